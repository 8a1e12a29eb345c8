"""The server as a process of its own: keys, real S3 and NATS, its end, and that of its engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from services.inference.tests.adapters_for_tests import write_adapter
from services.inference.tests.serving import prompt_of, publish

from opentinker_kit.events import NatsEventBus
from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.events.v1 import event_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import Unauthenticated, from_rpc_error

KEY, SERVICE_KEY = "k" * 43, "s" * 43


class Process:
    """A server started as the launcher starts it: settings by file, a pipe as its lifeline."""

    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        directory.mkdir(parents=True)
        for name, key in (("bootstrap", KEY), ("service", SERVICE_KEY)):
            path = directory / f"{name}.key"
            path.touch(0o600)
            path.write_text(key)
            settings[f"{name}_key_file"] = str(path)
        self.ready_file = directory / "ready.json"
        self.log = directory / "log"
        read_end, self.lifeline = os.pipe()
        settings |= {
            "state_dir": str(directory / "state"),
            "ready_file": str(self.ready_file),
            "lifeline_fd": read_end,
        }
        file = directory / "settings.json"
        file.touch(0o600)
        file.write_text(json.dumps(settings))
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "opentinker_inference", "--settings", str(file)],
                pass_fds=[read_end],
                stdout=output,
                stderr=output,
            )
        os.close(read_end)

    async def address(self, timeout_s: float = 90) -> str:
        def ready() -> bool:
            assert self.popen.poll() is None, self.log.read_text()
            return self.ready_file.exists()

        await wait_until(ready, timeout_s)
        return str(json.loads(self.ready_file.read_text())["address"])

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    processes: list[Process] = []

    def begin(**settings: object) -> Process:
        process = Process(tmp_path / f"server{len(processes)}", settings)
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.end()


async def gone(processes: list[psutil.Process], within_s: float = 10) -> None:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, within_s)
    assert not alive


def request(request_id: str, model: sampling_pb2.ModelRef) -> pb.SampleRequest:
    params = sampling_pb2.SamplingParams(max_tokens=4, seed=1)
    return pb.SampleRequest(request_id=request_id, model=model, prompt=prompt_of(b"hello"), params=params)


async def completions(stub: InferenceServiceStub, asked: pb.SampleRequest) -> list[sampling_pb2.Completion]:
    return [r.completion async for r in stub.Sample(asked) if r.WhichOneof("event") == "completion"]


async def test_versions_from_s3_and_prefetch_by_nats(
    start: Any, tiny_model_dir: Path, tmp_path: Path, s3: S3Settings, nats_server: Any
) -> None:
    process = start(
        base_model=str(tiny_model_dir),
        engine="transformers",
        allow_any_model_dir=True,
        model_cache_dir=str(tmp_path / "models"),
        s3=json.loads(s3.model_dump_json()),
        nats_url=nats_server.url,
    )
    objects = S3ObjectStore(s3)
    policy = f"policies/{uuid.uuid4().hex}"
    for version in (1, 2):
        path = write_adapter(tmp_path / str(version), tiny_model_dir, seed=version)
        await publish(objects, policy, version, path)
    async with open_channel(await process.address(), key=KEY) as channel:
        stub = InferenceServiceStub(channel)
        refs = [
            sampling_pb2.ModelRef(policy_version=sampling_pb2.PolicyVersionRef(policy=policy, version=v))
            for v in (1, 2)
        ]
        one = await completions(stub, request("r1", refs[0]))
        bus = NatsEventBus(nats_server.url)
        event = event_pb2.Event(id=uuid.uuid4().hex, source="test", occur_time=Timestamp(seconds=1))
        event.weights_published.policy, event.weights_published.version = policy, 2
        assert await bus.deliver(event, timeout_s=10)
        await bus.close()
        fetched = tmp_path / "server0" / "state" / "versions" / str(process.popen.pid) / policy
        await wait_until((fetched / "versions" / "2" / "adapter_config.json").exists, 20)
        two = await completions(stub, request("r2", refs[1]))
        assert one[0].token_ids
        assert one[0].logprobs != two[0].logprobs
    async with open_channel(await process.address(), key="wrong") as channel:
        call = InferenceServiceStub(channel).ListModels(pb.ListModelsRequest())
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert isinstance(from_rpc_error(caught.value), Unauthenticated)
    children = process.children()
    assert children
    process.popen.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.popen.wait, 20) == 0
    await gone(children)
    assert not fetched.exists()


@pytest.mark.parametrize("how", ["killed", "lifeline"])
async def test_nothing_is_left_when_the_server_or_its_supervisor_dies(
    start: Any, tiny_model_dir: Path, tmp_path: Path, how: str
) -> None:
    # B110
    process = start(
        base_model=str(tiny_model_dir),
        engine="noop",
        allow_any_model_dir=True,
        model_cache_dir=str(tmp_path / "models"),
    )
    await process.address()
    everything = [psutil.Process(process.popen.pid), *process.children()]
    assert len(everything) == 2
    if how == "killed":
        process.popen.kill()
    else:
        os.close(process.lifeline)
        process.lifeline = -1
    await asyncio.to_thread(process.popen.wait, 10)
    await gone(everything[1:])


async def test_what_cannot_be_served_ends_with_a_reason(start: Any, tmp_path: Path) -> None:
    unknown = start(base_model="no-such-model", engine="noop", model_cache_dir=str(tmp_path / "models"))
    assert await asyncio.to_thread(unknown.popen.wait, 60) == 1
    assert "no-such-model" in unknown.log.read_text()
    assert "smollm2-135m-instruct" in unknown.log.read_text()


@pytest.mark.slow
async def test_an_engine_that_does_not_start_ends_the_server(
    start: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_model_dir.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not weights")
    process = start(
        base_model=str(broken),
        engine="transformers",
        allow_any_model_dir=True,
        model_cache_dir=str(tmp_path / "models"),
    )
    assert await asyncio.to_thread(process.popen.wait, 110) == 1
    assert "engine cannot be started" in process.log.read_text()
