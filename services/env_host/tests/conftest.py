"""A real env_host with real worker processes, in the test's event loop."""

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from opentinker_env_host.adapters.jails import default_folder
from opentinker_env_host.adapters.worker_process import ProcessWorker
from opentinker_env_host.bootstrap import EnvHost, build
from opentinker_env_host.settings import EnvHostSettings, EnvironmentSettings
from opentinker_kit.events import NullEventBus
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1 import environment_pb2
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceStub
from opentinkerapi.events.v1 import event_pb2
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import from_rpc_error

WORLDS = Path(__file__).parent / "worlds"


def world(name: str, **options: Any) -> EnvironmentSettings:
    """A class of `worlds`."""
    return EnvironmentSettings(target=f"worlds:{name}", path=(WORLDS,), **options)


async def stop(host: "Running") -> None:
    """Stop a host as its process does; the fixture finds it stopped."""
    await host.env_host.server.drain()
    await host.env_host.stop()


class RecordingBus(NullEventBus):
    """Keeps what is published."""

    def __init__(self) -> None:
        self.failed: list[event_pb2.EpisodeFailed] = []

    async def publish(self, event: event_pb2.Event, msg_id: str = "") -> None:
        await super().publish(event, msg_id)
        assert msg_id == event.id
        self.failed.append(event.episode_failed)


@dataclass
class Running:
    """A started env_host and short ways to call it. Failures are the client's typed errors."""

    env_host: EnvHost
    channel: grpc.aio.Channel
    bus: RecordingBus
    stub: EnvHostServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = EnvHostServiceStub(self.channel)

    def workers(self, environment: str = "counter") -> list[ProcessWorker]:
        pool = self.env_host.host._pools[environment]
        return [worker for worker in pool.workers if isinstance(worker, ProcessWorker)]

    async def open(
        self,
        environment: str = "counter",
        size: int = 1,
        *,
        timeout_s: float = 5.0,
        ttl_s: float = 60.0,
        **fields: Any,
    ) -> list[str]:
        request = pb.OpenGroupRequest(
            request_id=uuid.uuid4().hex, environment=f"environments/{environment}", size=size, **fields
        )
        request.step_timeout.FromNanoseconds(int(timeout_s * 1e9))
        request.lease_ttl.FromNanoseconds(int(ttl_s * 1e9))
        return list((await self.call(self.stub.OpenGroup(request))).episodes)

    async def begin(self, episode: str) -> str:
        answer = await self.call(self.stub.Begin(pb.BeginRequest(episode=episode)))
        return text_of(answer.pending)

    async def step(self, episode: str, seq: int, text: str) -> pb.StepResponse:
        action = environment_pb2.Action()
        action.content.parts.add(text=text)
        actions = [environment_pb2.AgentAction(agent="agent", action=action)]
        return await self.call(self.stub.Step(pb.StepRequest(episode=episode, seq=seq, actions=actions)))

    async def finalize(self, episode: str) -> pb.FinalizeResponse:
        return await self.call(self.stub.Finalize(pb.FinalizeRequest(episode=episode)))

    async def close(self, episodes: Sequence[str]) -> None:
        await self.call(self.stub.CloseEpisodes(pb.CloseEpisodesRequest(episodes=episodes)))

    async def call(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def text_of(pending: Any) -> str:
    """The text of the only pending observation."""
    (item,) = pending
    return "".join(part.text for part in item.observation.content.parts)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an env_host with these environments (by default one `counter`) and settings."""
    started: list[tuple[Running, asyncio.Task[None]]] = []

    async def run(
        environments: dict[str, EnvironmentSettings] | None = None,
        *,
        real_bus: bool = False,
        **settings: Any,
    ) -> Running:
        bus = RecordingBus()
        env_host = build(
            EnvHostSettings(
                environments=environments or {"counter": world("Counter")},
                **{"state_dir": tmp_path / f"state-{len(started)}", "drain_s": 1.0, **settings},
            ),
            bus=None if real_bus else bus,
        )
        port = await env_host.start()
        serving = asyncio.create_task(env_host.serve())
        running = Running(env_host, open_channel(f"127.0.0.1:{port}"), bus)
        started.append((running, serving))
        return running

    yield run
    for running, serving in started:
        await running.channel.close()
        await running.env_host.server.drain()
        await serving
        await running.env_host.stop()
    for number in range(len(started)):
        shutil.rmtree(default_folder(tmp_path / f"state-{number}"), ignore_errors=True)
    shutil.rmtree(default_folder(tmp_path / "state"), ignore_errors=True)
