"""How fast the trainer takes optimizer steps, in bfloat16: tokens a second and model flops utilization.

LoRA of rank 16 on all linear layers. A step is measured from the request to the result of the optimizer step.
The flops of a token are 4 for each weight that it is multiplied with: 2 forwards, 2 for the gradient of the
activations; that of frozen weights is not computed. Attention and the adapter are not counted.
"""

import asyncio
import statistics
import time

import numpy as np

from benchmarks.sample_work import FIRST_WORD
from benchmarks.train_ours import Policy
from benchmarks.train_rows import TrainRow
from opentinker_kit.models import resolve_model
from opentinker_kit.objects import MemoryObjectStore
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.trainer.v1 import trainer_service_pb2_grpc
from scripts.gpu_checks import Setup, matrix_weights, report, vocabulary_of
from scripts.gpu_checks.servers import training

MICRO_BATCH_TOKENS = {"cuda": 16_384, "cpu": 512}


async def _check(setup: Setup) -> dict[str, object]:
    model_dir = resolve_model(setup.model, allow_any_dir=True).path
    generator = np.random.default_rng(0)
    words = vocabulary_of(model_dir)
    prompt = setup.row_tokens // 4
    mask = [0] * prompt + [1] * (setup.row_tokens - prompt)
    rows = [
        TrainRow(generator.integers(FIRST_WORD, words, setup.row_tokens).tolist(), mask)
        for _ in range(setup.rows)
    ]
    budget = MICRO_BATCH_TOKENS[setup.device]
    settings = {"dtype": "bfloat16", "micro_batch_tokens": budget, "slice_tokens": budget}
    async with training(setup, MemoryObjectStore(), **settings) as channel:
        policy = Policy(trainer_service_pb2_grpc.TrainerServiceStub(channel), rows, setup.model)
        tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=16, alpha=32))
        await policy.create("throughput", tuning)
        await policy.step()
        seconds = []
        for _ in range(setup.steps):
            began = time.perf_counter()
            await policy.step()
            seconds.append(time.perf_counter() - began)
    tokens_per_s = setup.rows * setup.row_tokens / statistics.median(seconds)
    flops = 4.0 * matrix_weights(model_dir)
    return {
        "dtype": "bfloat16",
        "rows": setup.rows,
        "row_tokens": setup.row_tokens,
        "step_s": [round(each, 4) for each in seconds],
        "tokens_per_s": round(tokens_per_s, 1),
        "flops_per_token": flops,
        "mfu": setup.utilization(flops * tokens_per_s),
    }


def run(setup: Setup) -> dict[str, object]:
    return asyncio.run(_check(setup))


if __name__ == "__main__":
    report(run)
