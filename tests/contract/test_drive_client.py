"""Hosted sessions over Drive: streams that break, hosts that have none, and how much goes into a message.

Between the sessions and a real env_host stands a server that does to their calls what a test asks for.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from opentinker.environments import Action, EnvironmentSource, environment_source
from opentinker.environments.builtin import GuessNumber
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1.env_host_service_pb2_grpc import (
    EnvHostServiceServicer,
    EnvHostServiceStub,
    add_EnvHostServiceServicer_to_server,
)
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import EpisodeNotFound, FailedPrecondition, SeqReused
from tests.contract import test_environment_session as sessions

EPISODES = 24


class Between(EnvHostServiceServicer):
    """Passes on what it is asked."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = EnvHostServiceStub(channel)
        self.unary: list[str] = []
        """Begin, Step and Finalize that came by themselves."""
        self.messages: list[int] = []
        """How many calls each message of a stream had."""
        self.streams = 0
        self.cut_after: int | None = None
        """Responses after which a stream is cut; the one that follows is lost. None: there is no Drive."""

    async def pass_on(self, name: str, request: Any, context: Any) -> Any:
        if name in ("Begin", "Step", "Finalize"):
            self.unary.append(name)
        try:
            return await getattr(self._stub, name)(request)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))

    async def Drive(self, requests: AsyncIterator[pb.DriveRequest], context: Any) -> AsyncIterator[Any]:
        if self.cut_after is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        self.streams += 1

        async def passed_on() -> AsyncIterator[pb.DriveRequest]:
            async for request in requests:
                self.messages.append(len(request.calls))
                yield request

        call: Any = self._stub.Drive(passed_on())
        responses = 0
        async for response in call:
            if responses == self.cut_after:
                call.cancel()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            responses += 1
            yield response


def _passing(name: str) -> Any:
    async def method(self: Between, request: Any, context: Any) -> Any:
        return await self.pass_on(name, request, context)

    return method


for _method in pb.DESCRIPTOR.services_by_name["EnvHostService"].methods:
    if _method.name != "Drive":
        setattr(Between, _method.name, _passing(_method.name))


@pytest.fixture(scope="module")
def host_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with sessions.running_host(tmp_path_factory.mktemp("env_host")) as port:
        yield port


@pytest.fixture
async def between(host_port: int) -> AsyncIterator[Between]:
    async with open_channel(f"127.0.0.1:{host_port}") as channel:
        yield Between(channel)


@contextlib.asynccontextmanager
async def standing(between: Between) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    add_EnvHostServiceServicer_to_server(between, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.fixture
async def where(between: Between) -> AsyncIterator[grpc.aio.Channel]:
    async with standing(between) as channel:
        yield channel


class TestHostedSessionWithoutDrive(sessions.TestHostedSession):
    """A host of an older version: everything is as it was, by a call each."""

    @pytest.fixture
    async def where(self, host_port: int) -> AsyncIterator[grpc.aio.Channel]:
        async with open_channel(f"127.0.0.1:{host_port}") as channel:
            between = Between(channel)
            async with standing(between) as where:
                yield where
            assert not between.messages


async def play(source: EnvironmentSource) -> list[list[Any]]:
    """What some episodes come to, all played at once."""

    async def one(seed: int) -> list[Any]:
        (session,) = await source.open_group(task={}, seed=seed, size=1)
        seen: list[Any] = [await session.begin()]
        for seq, guess in enumerate((500, 250, 750, 125, 375), start=1):
            seen.append(await session.step(Action(str(guess)), seq))
            if seen[-1].done:
                break
        seen.append(await session.finalize())
        await session.close()
        return seen

    return await asyncio.gather(*(one(seed) for seed in range(EPISODES)))


async def test_calls_of_many_sessions_share_messages(where: grpc.aio.Channel, between: Between) -> None:
    between.cut_after = 10**9
    source = await environment_source("guess_number", {"high": 1000}, channel=where)
    played = await play(source)
    await source.close()
    assert played == await play(await environment_source(GuessNumber, {"high": 1000}))
    assert between.streams == 1
    assert not between.unary
    assert sum(between.messages) == sum(len(seen) for seen in played)
    assert max(between.messages) > 1


@pytest.mark.parametrize("responses", [0, 1, 2, 5])
async def test_a_stream_that_breaks_again_and_again_changes_nothing(
    where: grpc.aio.Channel, between: Between, responses: int
) -> None:
    # After 0 responses nothing would ever come through: the first streams only are cut at once.
    between.cut_after = responses
    source = await environment_source("guess_number", {"high": 1000}, channel=where)
    playing = asyncio.create_task(play(source))
    if responses == 0:
        await asyncio.sleep(1.0)
        between.cut_after = 3
    played = await playing
    await source.close()
    # A step that was played twice would leave one guess less, and end on another observation.
    assert played == await play(await environment_source(GuessNumber, {"high": 1000}))
    assert between.streams > 1
    assert not between.unary


async def test_errors_over_drive_are_those_of_a_call(where: grpc.aio.Channel, between: Between) -> None:
    between.cut_after = 10**9
    source = await environment_source("guess_number", {"high": 1000}, channel=where)
    session, other = await source.open_group(task={}, seed=1, size=2)
    with pytest.raises(FailedPrecondition, match="has not begun"):
        await session.step(Action("1"), 1)
    await session.begin()
    with pytest.raises(FailedPrecondition) as raised:
        await session.step(Action("1"), 3)
    assert raised.value.metadata["next_seq"] == "1"
    await session.step(Action("1"), 1)
    with pytest.raises(SeqReused):
        await session.step(Action("2"), 1)
    await other.close()
    with pytest.raises(EpisodeNotFound):
        await other.begin()
    assert not between.unary
    await source.close()
    # What waits when a source is closed does not wait for ever.
    with pytest.raises(EpisodeNotFound):
        await session.begin()
