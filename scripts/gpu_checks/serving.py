"""A policy that is trained and served: does the sampler say what the trainer would, and how fast is it?

A LoRA policy takes two large steps, its weights are published and sampled from, and the trainer scores what
came: the mean difference of their logprobs, with the trainer in the sampler's precision and in float32 over
the same stored weights. The base model is scored as well, which must be further away, or no adapter was
served. `adapter` and `merged` are the two ways to serve one.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sample_ours import Client
from benchmarks.sample_work import FIRST_WORD, Work
from benchmarks.train_ours import Policy
from benchmarks.train_rows import TrainRow
from opentinker_kit.models import resolve_model
from opentinker_kit.objects import MemoryObjectStore
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import prompt_pb2, train_sample_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, inference_service_pb2_grpc, sampling_pb2
from opentinkerapi.runtime.tensors import pack_ids, unpack_floats, unpack_ids
from opentinkerapi.trainer.v1 import trainer_service_pb2_grpc
from scripts.gpu_checks import Setup, matrix_weights, report, vocabulary_of
from scripts.gpu_checks.servers import sampling, training

LARGE_STEP = 2e-3
SCORED_REQUESTS, SCORED_TOKENS, PROMPT_TOKENS = 16, 32, 32
KV_CACHE_BYTES = 4 << 30
"""So that trainer and sampler fit on one device."""
BOUND = {"bfloat16": 0.15, "float32": 1e-3}
"""What the mean difference may be, by the sampler's precision; more is no rounding."""


async def _check(setup: Setup, mode: str) -> dict[str, object]:
    model_dir = resolve_model(setup.model, allow_any_dir=True).path
    words = vocabulary_of(model_dir)
    asked = Work(0, SCORED_REQUESTS, 1, PROMPT_TOKENS, SCORED_TOKENS, vocabulary=words)
    load = replace(asked, requests=setup.requests, new_tokens=setup.new_tokens)
    objects = MemoryObjectStore()
    began = time.perf_counter()
    async with sampling(setup, objects, serving_mode=mode, kv_cache_bytes=KV_CACHE_BYTES) as channel:
        started_s = round(time.perf_counter() - began, 1)
        stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        offer = await stub.GetCapabilities(inference_service_pb2.GetCapabilitiesRequest())
        async with training(setup, objects, dtype=offer.dtype) as channel_of_trainer:
            policy, base = await _policies(setup, channel_of_trainer, mode, words)
            client = Client(stub, _version(policy))
            completions = await client.completions(asked)
            rows = _rows(asked, completions)
            gaps = {
                "same_precision": _gap(completions, await policy.forward(rows)),
                "of_the_base": _gap(completions, await base.forward(rows)),
            }
        await client.run(replace(load, repetition=1))
        seconds = (await client.run(replace(load, repetition=2)))["seconds"]
        if offer.dtype != "float32":
            wide = {"dtype": offer.dtype, "forward_dtype": "float32"}
            async with training(setup, objects, **wide) as channel_of_trainer:
                policy, _ = await _policies(setup, channel_of_trainer, f"{mode} wide", words)
                completions = await Client(stub, _version(policy)).completions(asked)
                own = await policy.forward(_rows(asked, completions))
                gaps["float32_forward"] = _gap(completions, own)
    if not gaps["same_precision"] < min(BOUND[offer.dtype], gaps["of_the_base"]):
        raise RuntimeError(f"the sampler does not say what the trainer says: {gaps}")
    tokens_per_s = load.tokens / seconds
    flops = 2.0 * matrix_weights(model_dir)
    return {
        "engine": offer.engine,
        "dtype": offer.dtype,
        "serving_mode": mode,
        "engine_start_s": started_s,
        "logprob_gap": {name: round(gap, 7) for name, gap in gaps.items()},
        "requests": load.requests,
        "new_tokens": load.new_tokens,
        "tokens_per_s": round(tokens_per_s, 1),
        "flops_per_token": flops,
        "mfu": setup.utilization(flops * tokens_per_s),
    }


async def _policies(setup: Setup, channel: Any, name: str, words: int) -> tuple[Policy, Policy]:
    """One that took two large steps on random tokens and was published, and one that took none."""
    stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
    generator = np.random.default_rng(0)
    rows = [
        TrainRow(generator.integers(FIRST_WORD, words, 64).tolist(), [0] * 8 + [1] * 56) for _ in range(4)
    ]
    tuning = policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=16, alpha=32))
    policy, base = (Policy(stub, rows, setup.model) for _ in range(2))
    await policy.create(name, tuning)
    await base.create(f"{name} base", tuning)
    for _ in range(2):
        await policy.step(LARGE_STEP)
    await policy.publish()
    return policy, base


def _version(policy: Policy) -> sampling_pb2.ModelRef:
    ref = sampling_pb2.PolicyVersionRef(policy=policy.name, version=1)
    return sampling_pb2.ModelRef(policy_version=ref)


def _rows(work: Work, completions: Sequence[sampling_pb2.Completion]) -> list[train_sample_pb2.TrainSample]:
    """Each prompt with its completion, which is what is scored."""
    rows = []
    for number, completion in enumerate(completions):
        prompt, ids = work.prompt(number), unpack_ids(completion.token_ids)
        tokens = prompt_pb2.TokenChunk(token_ids=pack_ids(prompt + ids))
        mask = bytes([0] * len(prompt) + [1] * len(ids))
        rows.append(train_sample_pb2.TrainSample(chunks=[prompt_pb2.Chunk(tokens=tokens)], loss_mask=mask))
    return rows


def _gap(completions: Sequence[sampling_pb2.Completion], own: Sequence[NDArray[np.float32]]) -> float:
    """Mean difference over all tokens."""
    pairs = zip(completions, own, strict=True)
    return float(
        np.mean(np.concatenate([np.abs(unpack_floats(each.logprobs) - mine) for each, mine in pairs]))
    )


def run(setup: Setup) -> dict[str, object]:
    return asyncio.run(_check(setup, sys.argv[2]))


if __name__ == "__main__":
    report(run)
