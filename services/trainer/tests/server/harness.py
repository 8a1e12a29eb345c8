"""A trainer process and a client for it that speaks the wire directly."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil

from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import wait_until
from opentinker_trainer.domain.samples import ARRAYS, Sample
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import loss_pb2, prompt_pb2, train_sample_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.runtime.tensors import pack_floats, pack_ids
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2, trainer_service_pb2_grpc

pb = trainer_service_pb2
DONE = operation_pb2.OPERATION_STATE_DONE
FAILED = operation_pb2.OPERATION_STATE_FAILED


def message(sample: Sample) -> train_sample_pb2.TrainSample:
    """A row as it travels."""
    chunk = prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(sample.token_ids)))
    built = train_sample_pb2.TrainSample(
        chunks=[chunk],
        loss_mask=sample.loss_mask.astype(np.uint8).tobytes(),
        sampling_temperature=sample.temperature,
    )
    for name in ARRAYS:
        if (array := getattr(sample, name)) is not None:
            setattr(built, name, pack_floats(array))
    if sample.support is not None:
        built.support_sizes = pack_ids(sample.support.sizes)
        built.support_token_ids = pack_ids(sample.support.ids)
    return built


def cross_entropy(denominator: float = 10.0, name: str = "main") -> loss_pb2.LossComponent:
    return loss_pb2.LossComponent(
        name=name, cross_entropy=loss_pb2.CrossEntropyLoss(), denominator=denominator
    )


class Client:
    """Calls of one policy, with seqs counted up; errors are the client's typed ones."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = trainer_service_pb2_grpc.TrainerServiceStub(channel)
        self.policy = ""
        self.seq = 0

    async def create(
        self,
        request_id: str = "create",
        *,
        model: str = "tiny",
        rank: int = 4,
        tuning: policy_pb2.Tuning | None = None,
        **more: Any,
    ) -> pb.CreatePolicyResponse:
        tuning = tuning or policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=rank))
        response = await self.call(
            "CreatePolicy",
            pb.CreatePolicyRequest(request_id=request_id, base_model=model, tuning=tuning, seed=7, **more),
        )
        self.policy, self.seq = response.policy.name, 0
        return response

    async def call(self, method: str, request: Any, timeout: float = 60.0) -> Any:
        try:
            return await getattr(self.stub, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def header(
        self, seq: int | None = None, request_id: str | None = None, acked: int = 0
    ) -> operation_pb2.OperationHeader:
        if seq is None:
            self.seq += 1
            seq = self.seq
        return operation_pb2.OperationHeader(
            policy=self.policy, seq=seq, request_id=request_id or f"r{seq}", acked_seq=acked
        )

    async def forward_backward(
        self,
        samples: Sequence[Sample | train_sample_pb2.TrainSample],
        losses: Sequence[loss_pb2.LossComponent] = (),
        *,
        header: operation_pb2.OperationHeader | None = None,
        chunks: int = 1,
        **options: bool,
    ) -> operation_pb2.Operation:
        rows = [message(row) if isinstance(row, Sample) else row for row in samples]
        start = pb.ForwardBackwardStart(
            header=header or self.header(),
            chunk_count=chunks,
            losses=losses or [cross_entropy()],
            **options,
        )

        async def parts() -> AsyncIterator[pb.ForwardBackwardRequest]:
            yield pb.ForwardBackwardRequest(start=start)
            for index in range(chunks):
                chunk = pb.SampleChunk(index=index, samples=rows[index::chunks])
                yield pb.ForwardBackwardRequest(chunk=chunk)

        return (await self.call("ForwardBackward", parts())).operation

    async def forward(
        self, samples: Sequence[Sample | train_sample_pb2.TrainSample], **options: bool
    ) -> operation_pb2.Operation:
        rows = [message(row) if isinstance(row, Sample) else row for row in samples]
        start = pb.ForwardStart(header=self.header(), chunk_count=1, **options)

        async def parts() -> AsyncIterator[pb.ForwardRequest]:
            yield pb.ForwardRequest(start=start)
            yield pb.ForwardRequest(chunk=pb.SampleChunk(index=0, samples=rows))

        return (await self.call("Forward", parts())).operation

    def step_request(
        self, seqs: Sequence[int], header: operation_pb2.OperationHeader | None = None, **more: Any
    ) -> pb.OptimStepRequest:
        return pb.OptimStepRequest(
            header=header or self.header(),
            forward_backward_seqs=seqs,
            adamw=pb.AdamW(learning_rate=1e-2, weight_decay=0.01),
            clip_norm=1.0,
            **more,
        )

    async def step(self, seqs: Sequence[int], **more: Any) -> operation_pb2.Operation:
        return (await self.call("OptimStep", self.step_request(seqs, **more))).operation

    async def publish(self) -> operation_pb2.Operation:
        return (await self.call("PublishWeights", pb.PublishWeightsRequest(header=self.header()))).operation

    async def save(self) -> operation_pb2.Operation:
        return (await self.call("SaveCheckpoint", pb.SaveCheckpointRequest(header=self.header()))).operation

    async def restore(self, checkpoint: str, *, weights_only: bool = False) -> operation_pb2.Operation:
        request = pb.RestoreCheckpointRequest(
            header=self.header(), checkpoint=checkpoint, weights_only=weights_only
        )
        return (await self.call("RestoreCheckpoint", request)).operation

    async def result(self, seq: int, timeout_s: float = 60.0) -> operation_pb2.Operation:
        """An operation at its end."""
        request = pb.GetOperationRequest(policy=self.policy, seq=seq)
        request.wait.FromSeconds(20)
        async with asyncio.timeout(timeout_s):
            while True:
                operation = (await self.call("GetOperation", request)).operation
                if operation.state in (DONE, FAILED):
                    return operation

    async def done(self, operation: operation_pb2.Operation) -> operation_pb2.Operation:
        """The same, which must have ended well."""
        return await self.done_seq(operation.seq)

    async def done_seq(self, seq: int) -> operation_pb2.Operation:
        ended = await self.result(seq)
        assert ended.state == DONE, ended.error.message
        return ended


class TrainerProcess:
    """`python -m opentinker_trainer` with a state directory of its own, at a port that stays."""

    def __init__(self, directory: Path, s3: S3Settings, **settings: Any) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.settings = {
            "base_model": "tiny",
            "threads": 1,
            "state_dir": str(directory / "state"),
            "ready_file": str(directory / "ready.json"),
            "s3": s3.model_dump(mode="json"),
            "log_json": False,
            **{key: value for key, value in settings.items() if value is not None},
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    async def start(self, timeout_s: float = 60.0) -> None:
        ready = self.directory / "ready.json"
        ready.unlink(missing_ok=True)
        path = self.directory / "settings.json"
        path.write_text(json.dumps(self.settings))
        path.chmod(0o600)
        with (self.directory / "trainer.log").open("ab") as output:
            self.process = subprocess.Popen(  # noqa: ASYNC220 (fork and exec take a millisecond)
                [sys.executable, "-m", "opentinker_trainer", "--settings", str(path)],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        await wait_until(
            lambda: ready.exists() or self.process is None or self.process.poll() is not None,
            timeout_s,
            what="trainer ready",
        )
        assert ready.exists(), self.log()
        self.address = json.loads(ready.read_text())["address"]
        self.settings["listen_port"] = int(self.address.rpartition(":")[2])

    def log(self) -> str:
        return (self.directory / "trainer.log").read_text()[-6000:]

    def engine_pid(self) -> int:
        """The engine child's process id."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        assert children, "no engine"
        return int(children[0].pid)

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def kill(self) -> None:
        """Kill the front, as a crash would; its engine goes with it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def terminate(self, timeout_s: float = 20.0) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.kill()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with open_channel(self.address) as channel:
            yield Client(channel)


async def refused(call: Any) -> OpenTinkerError:
    """The error that a call ends with."""
    try:
        await call
    except OpenTinkerError as error:
        return error
    raise AssertionError("it was not refused")
