"""A server's life: refusing to be open, health, reflection, draining, ending with its supervisor."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.server import build_server
from opentinker_kit.settings import ServerSettings
from opentinker_kit.testing import wait_until, wait_until_sync
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime import errors
from opentinkerapi.runtime.channels import auth_metadata

from .conftest import BLOB, CALLER_KEY, INFERENCE, METHODS, Start
from .test_interceptors import SAMPLE, UPLOAD, failure

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

PROGRAM = """
import asyncio, sys
from opentinker_kit.auth import AuthPolicy
from opentinker_kit.server import build_server
from opentinker_kit.settings import ServerSettings, load_settings

async def main():
    settings = load_settings(ServerSettings)
    server = build_server(settings, lambda server: None, service_names=[], auth=AuthPolicy(None, None, {}))
    await server.start(install_signals=True)
    await server.set_serving(True)
    await server.wait()

asyncio.run(main())
"""


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


@pytest.mark.parametrize("policy", [AuthPolicy(None, None, {}), AuthPolicy("bootstrap", None, {})])
def test_b97_other_than_loopback_is_refused_without_keys(policy: AuthPolicy, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="service_key_file"):
        ServerSettings(listen_host="0.0.0.0")
    keys = {"service_key_file": tmp_path / "s", "bootstrap_key_file": tmp_path / "b"}
    settings = ServerSettings(listen_host="0.0.0.0", **keys)
    with pytest.raises(ValueError, match="refusing to listen"):
        build_server(settings, lambda server: None, service_names=[], auth=policy)


async def test_health_says_not_serving_until_told_and_needs_no_key(start: Start) -> None:
    running = await start(serving=False)
    async with running.channel(None) as channel:
        assert await health(channel) == NOT_SERVING
        assert await health(channel, INFERENCE) == NOT_SERVING
        await running.server.set_serving(True, BLOB)
        assert (await health(channel, BLOB), await health(channel, INFERENCE)) == (SERVING, NOT_SERVING)
        await running.server.set_serving(True)
        assert (await health(channel), await health(channel, INFERENCE)) == (SERVING, SERVING)


async def test_reflection_lists_services_to_who_has_a_key(start: Start) -> None:
    running = await start()
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with running.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
    assert {BLOB, INFERENCE, "grpc.health.v1.Health"} <= names


async def test_draining_turns_not_serving_refuses_new_calls_and_finishes_running_ones(start: Start) -> None:
    running = await start()
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        entered.set()
        await go_on.wait()

    running.behavior.sample = wait
    async with running.channel() as channel, running.channel() as other:
        watch = health_pb2_grpc.HealthStub(other).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = InferenceServiceStub(channel).Sample(SAMPLE)
        await call.read()
        await entered.wait()
        drained = asyncio.create_task(running.server.drain())
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await wait_until(lambda: running.server.draining)
        fresh = running.channel()
        assert isinstance(
            await failure(BlobServiceStub(fresh).CreateUpload(UPLOAD, timeout=5)), errors.Unavailable
        )
        await fresh.close()
        assert not drained.done()
        go_on.set()
        assert (await call.read()) != grpc.aio.EOF
        assert (await call.read()) == grpc.aio.EOF
        async with asyncio.timeout(5):
            await drained


async def test_a_call_that_does_not_end_is_cancelled_when_the_drain_is_over(start: Start) -> None:
    running = await start(drain_s=0.2)

    async def forever() -> None:
        await asyncio.Event().wait()

    running.behavior.sample = forever
    async with running.channel() as channel:
        call = InferenceServiceStub(channel).Sample(SAMPLE)
        await call.read()
        async with asyncio.timeout(5):
            await running.server.drain()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()


async def test_a_taken_port_is_an_error_unless_ports_are_kept(start: Start) -> None:
    first = await start()
    with pytest.raises(OSError, match="cannot listen"):
        await start(listen_port=first.server.port)


async def test_ready_file_is_written_when_the_server_serves(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "run" / "ready.json"
    running = await start(serving=False, ready_file=ready)
    assert not ready.exists()
    await running.server.set_serving(True)
    port = running.server.port
    wanted = {"port": port, "address": f"127.0.0.1:{port}", "pid": os.getpid()}
    assert json.loads(ready.read_text()) == wanted


async def test_calls_go_on_when_a_server_comes_back_at_its_address(start: Start) -> None:
    first = await start()
    port = first.server.port
    async with first.channel() as channel:
        stub = BlobServiceStub(channel)
        await stub.CreateUpload(UPLOAD)
        await first.server.drain()
        await start(listen_port=port)
        answer = await stub.CreateUpload(UPLOAD, wait_for_ready=True, timeout=10)
    assert answer.url == "put-here"


def test_metadata_is_what_other_languages_send() -> None:
    assert auth_metadata(CALLER_KEY, "t") == (
        ("authorization", f"Bearer {CALLER_KEY}"),
        ("x-opentinker-job-token", "t"),
    )
    assert auth_metadata(None) == ()
    assert METHODS


class TestProcess:
    """The same as a process of its own."""

    def spawn(self, tmp_path: Path, **settings: object) -> tuple[subprocess.Popen[bytes], Path]:
        ready = tmp_path / "ready.json"
        path = tmp_path / "settings.json"
        path.write_text(json.dumps({"ready_file": str(ready), **settings}))
        fds = [fd for key, fd in settings.items() if key == "lifeline_fd" and isinstance(fd, int)]
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, "--settings", str(path)], pass_fds=fds)
        wait_until_sync(ready.exists, 20)
        return process, ready

    def test_sigterm_drains_and_ends_with_status_0(self, tmp_path: Path) -> None:
        process, _ = self.spawn(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0

    def test_it_ends_when_the_lifeline_closes(self, tmp_path: Path) -> None:
        read, write = os.pipe()
        process, _ = self.spawn(tmp_path, lifeline_fd=read)
        os.close(read)
        assert process.poll() is None
        os.close(write)
        assert process.wait(6) is not None
