"""Our side of the training benchmarks: a whole trainer server, and a client that speaks the wire to it.

The server is the real one, front and engine child, on an object store in memory: what is measured is from the
first byte of a request to the result of the optimizer step. `python -m benchmarks.train_ours …` starts the
server, makes its policies and takes a step of all of them, side by side, for each line of its input.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.train_rows import TrainRow, read_rows
from opentinker_kit.events import NullEventBus
from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.testing import wait_until
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import loss_pb2, prompt_pb2, train_sample_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.tensors import pack_floats, pack_ids, unpack_floats
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2, trainer_service_pb2_grpc

pb = trainer_service_pb2
MODEL = "smollm2-135m-instruct"
LOAD_TIMEOUT_S = 240.0
ENDED = (operation_pb2.OPERATION_STATE_DONE, operation_pb2.OPERATION_STATE_FAILED)


def message(row: TrainRow) -> train_sample_pb2.TrainSample:
    """A row as it travels."""
    ids = pack_ids(np.array(row.token_ids, np.int32))
    chunk = prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=ids))
    built = train_sample_pb2.TrainSample(chunks=[chunk], loss_mask=bytes(row.loss_mask))
    if row.logprobs is not None:
        built.behavior_logprobs = pack_floats(np.array(row.logprobs, np.float32))
        built.advantages = pack_floats(np.full(len(row.token_ids), row.advantage, np.float32))
    return built


def loss(rows: Sequence[TrainRow]) -> loss_pb2.LossComponent:
    """Cross-entropy, or PPO where the rows have logprobs, over all loss tokens."""
    component = loss_pb2.LossComponent(name="main", denominator=float(sum(row.loss_tokens for row in rows)))
    if rows[0].logprobs is None:
        component.cross_entropy.SetInParent()
    else:
        component.ppo.SetInParent()
    return component


class Policy:
    """One policy and its operations."""

    def __init__(self, stub: Any, rows: Sequence[TrainRow], model: str = MODEL) -> None:
        self._stub = stub
        self._rows = [message(row) for row in rows]
        self._loss = loss(rows)
        self._model = model
        self._seq = 0
        self.name = ""

    async def create(self, request_id: str, tuning: policy_pb2.Tuning) -> None:
        request = pb.CreatePolicyRequest(request_id=request_id, base_model=self._model, tuning=tuning, seed=1)
        self.name = (await self._stub.CreatePolicy(request)).policy.name

    def _header(self) -> operation_pb2.OperationHeader:
        self._seq += 1
        return operation_pb2.OperationHeader(
            policy=self.name, seq=self._seq, request_id=f"r{self._seq}", acked_seq=max(0, self._seq - 2)
        )

    async def step(self, learning_rate: float = 1e-5) -> None:
        """ForwardBackward and OptimStep, to the result of the latter."""
        header = self._header()
        start = pb.ForwardBackwardStart(header=header, chunk_count=1, losses=[self._loss])

        async def parts() -> AsyncIterator[pb.ForwardBackwardRequest]:
            yield pb.ForwardBackwardRequest(start=start)
            yield pb.ForwardBackwardRequest(chunk=pb.SampleChunk(index=0, samples=self._rows))

        await self._stub.ForwardBackward(parts())
        step = pb.OptimStepRequest(
            header=self._header(),
            forward_backward_seqs=[header.seq],
            adamw=pb.AdamW(learning_rate=learning_rate),
            clip_norm=1.0,
        )
        await self._stub.OptimStep(step)
        await self._ended()

    async def publish(self) -> None:
        """The next version (1, 2, 3 ...)."""
        await self._stub.PublishWeights(pb.PublishWeightsRequest(header=self._header()))
        await self._ended()

    async def forward(self, rows: Sequence[train_sample_pb2.TrainSample]) -> list[NDArray[np.float32]]:
        """The policy's logprobs of the trained tokens of each row."""
        start = pb.ForwardStart(header=self._header(), chunk_count=1)

        async def parts() -> AsyncIterator[pb.ForwardRequest]:
            yield pb.ForwardRequest(start=start)
            yield pb.ForwardRequest(chunk=pb.SampleChunk(index=0, samples=rows))

        await self._stub.Forward(parts())
        outputs = (await self._ended()).forward.outputs
        return [
            unpack_floats(output.logprobs)[np.frombuffer(row.loss_mask, np.uint8) == 1]
            for row, output in zip(rows, outputs, strict=True)
        ]

    async def _ended(self) -> operation_pb2.Operation:
        """The newest operation at its end."""
        request = pb.GetOperationRequest(policy=self.name, seq=self._seq)
        request.wait.FromSeconds(30)
        operation = operation_pb2.Operation()
        while operation.state not in ENDED:
            operation = (await self._stub.GetOperation(request)).operation
        if operation.state != operation_pb2.OPERATION_STATE_DONE:
            raise RuntimeError(operation.error.message)
        return operation


async def serve(arguments: argparse.Namespace, directory: Path) -> None:
    """Start everything, then a step for each line."""
    settings = TrainerSettings(
        base_model=MODEL,
        dtype=arguments.dtype,
        threads=arguments.threads,
        state_dir=directory,
        recovery_every_steps=10_000,
        **json.loads(arguments.settings),
    )
    server = TrainerServer(settings, objects=MemoryObjectStore(), bus=NullEventBus())
    await server.start()
    await wait_until(lambda: server.admission.limits is not None, LOAD_TIMEOUT_S)
    tuning = policy_pb2.Tuning()
    if arguments.tuning == "lora":
        tuning.lora.CopyFrom(policy_pb2.LoraTuning(rank=16, alpha=32))
    else:
        tuning.full.SetInParent()
    rows = read_rows(arguments.rows)
    async with open_channel(server.server.address) as channel:
        stub: Any = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        policies = [Policy(stub, rows) for _ in range(arguments.policies)]
        for number, policy in enumerate(policies):
            await policy.create(f"policy {number}", tuning)
        answer: dict[str, Any] = {"ready": True}
        while True:
            print(json.dumps(answer), flush=True)
            if not await asyncio.to_thread(sys.stdin.readline):
                break
            begin = time.perf_counter()
            await asyncio.gather(*(policy.step() for policy in policies))
            answer = {"seconds": time.perf_counter() - begin}
    server.server.request_drain()
    await server.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tuning", choices=("lora", "full"), default="lora")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--policies", type=int, default=1)
    parser.add_argument("--settings", default="{}", help="further settings of the trainer, JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ot-bench-") as directory:
        asyncio.run(serve(arguments, Path(directory)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
