"""Many episodes over one stream: the same answers as one call each gives, whatever happens to the stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
import pytest
from services.env_host.tests.conftest import Running, Start, text_of, world

from opentinker_env_host import drive
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1 import environment_pb2
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error, from_status_data
from opentinkerapi.runtime.status import decode


def begin(episode: str) -> pb.DriveCall:
    return pb.DriveCall(begin=pb.BeginRequest(episode=episode))


def step(episode: str, seq: int, text: str = "go") -> pb.DriveCall:
    action = environment_pb2.Action()
    action.content.parts.add(text=text)
    actions = [environment_pb2.AgentAction(agent="agent", action=action)]
    return pb.DriveCall(step=pb.StepRequest(episode=episode, seq=seq, actions=actions))


def finalize(episode: str) -> pb.DriveCall:
    return pb.DriveCall(finalize=pb.FinalizeRequest(episode=episode))


def error_of(reply: pb.DriveReply) -> OpenTinkerError:
    assert reply.HasField("error"), reply
    return from_status_data(decode(reply.error))


class Stream:
    """A Drive stream; what it sends gets ids by itself."""

    def __init__(self, host: Running) -> None:
        self._queue: asyncio.Queue[pb.DriveRequest | None] = asyncio.Queue()
        self._last_id = 0
        self.call: Any = host.stub.Drive(self._requests())
        self.sizes: list[int] = []
        self._come: dict[int, pb.DriveReply] = {}

    async def _requests(self) -> AsyncIterator[pb.DriveRequest]:
        while (request := await self._queue.get()) is not None:
            yield request

    def send(self, calls: Iterable[pb.DriveCall]) -> list[int]:
        """Send calls in one message; their ids."""
        ids = []
        request = pb.DriveRequest(calls=calls)
        for call in request.calls:
            self._last_id += 1
            call.call_id = self._last_id
            ids.append(self._last_id)
        self._queue.put_nowait(request)
        return ids

    async def replies(self, ids: Sequence[int]) -> list[pb.DriveReply]:
        """The replies to these, in this order. Typed errors if the stream ends before."""
        while not all(number in self._come for number in ids):
            try:
                response = await self.call.read()
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            assert response is not grpc.aio.EOF
            self.sizes.append(len(response.replies))
            for reply in response.replies:
                assert reply.call_id not in self._come, "answered twice"
                self._come[reply.call_id] = reply
        return [self._come[number] for number in ids]

    async def ask(self, *calls: pb.DriveCall) -> list[pb.DriveReply]:
        async with asyncio.timeout(30):
            return await self.replies(self.send(calls))

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put_nowait(None)
        self.call.cancel()


async def test_many_episodes_over_one_stream_are_those_of_the_rpcs(start: Start) -> None:
    host = await start()
    alone, *driven = await host.open(size=101, seed=5)
    expected: list[Any] = [await host.begin(alone)]
    for seq in (1, 2):
        expected.append(text_of((await host.step(alone, seq, "go")).pending))
    await host.step(alone, 3, "end")
    async with Stream(host) as stream:
        first = await stream.ask(*map(begin, driven))
        assert {text_of(reply.begin.pending) for reply in first} == {expected[0]}
        for seq in (1, 2):
            replies = await stream.ask(*(step(episode, seq) for episode in driven))
            assert {text_of(reply.step.pending) for reply in replies} == {expected[seq]}
        replies = await stream.ask(*(step(episode, 3, "end") for episode in driven))
        assert all(reply.step.terminated for reply in replies)
        results = await stream.ask(*map(finalize, driven))
    result = await host.finalize(alone)
    assert all(reply.finalize == result for reply in results)
    # The point of it: answers that are there together share a message.
    assert len(stream.sizes) < len(driven) * 5 / 2


async def test_what_is_wrong_with_a_call_is_its_reply_and_the_stream_goes_on(start: Start) -> None:
    host = await start()
    good, bad, unbegun, nan = await host.open(size=4)
    async with Stream(host) as stream:
        await stream.ask(begin(good), begin(bad), begin(nan))
        two = step(good, 1)
        two.step.actions.append(two.step.actions[0])
        token = begin(good)
        token.begin.job_token = "t"
        wrong: Mapping[str, pb.DriveCall] = {
            "EPISODE_NOT_FOUND": begin("episodes/never-was"),
            "STEP_OUT_OF_ORDER": step(good, 7),
            "INVALID_STATE": step(unbegun, 1),
            "REQUIRED_FIELD": pb.DriveCall(step=pb.StepRequest(episode=good, seq=1)),
            "ENV_CRASHED": step(bad, 1, "raise"),
        }
        replies = await stream.ask(
            *wrong.values(), step(good, 1), two, token, pb.DriveCall(), step(nan, 1, "nan")
        )
        reasons = [error_of(reply).reason for reply in replies[: len(wrong)]]
        assert reasons == list(wrong)
        assert replies[len(wrong)].step.rewards[0].reward.value == 0.5
        fields = [error_of(reply).field for reply in replies[len(wrong) + 1 : -1]]
        assert fields == ["actions[1].agent", "begin.job_token", "call"]
        assert "must be finite" in str(error_of(replies[-1]))
        (again,) = await stream.ask(step(bad, 2))
        assert error_of(again).metadata["end_reason"] == "ENV_CRASH"
        (on,) = await stream.ask(step(good, 2))
        assert text_of(on.step.pending).startswith("count 2 ")


async def test_a_step_again_is_answered_without_playing(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    async with Stream(host) as stream:
        await stream.ask(begin(episode))
        once, again = await stream.ask(step(episode, 1, "sleep"), step(episode, 1, "sleep"))
        assert once.step == again.step
        assert await host.step(episode, 1, "sleep") == once.step
        (other,) = await stream.ask(step(episode, 1, "other"))
        assert error_of(other).reason == "SEQ_REUSED"
        first, second = await stream.ask(begin(episode), begin(episode))
        assert first.begin == second.begin
    assert host.env_host.host.steps["counter"] == 1


async def test_after_a_broken_stream_the_same_calls_find_their_answers(start: Start) -> None:
    host = await start()
    episodes = await host.open(size=20)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, episodes))
        stream.send(step(episode, 1, "sleep") for episode in episodes)
        await wait_until(lambda: len(host.env_host.host._background._running) >= len(episodes))
        # Gone in the middle of the steps.
    async with Stream(host) as stream:
        replies = await stream.ask(*(step(episode, 1, "sleep") for episode in episodes))
        assert all(text_of(reply.step.pending).startswith("count 1 ") for reply in replies)
        replies = await stream.ask(*(step(episode, 2) for episode in episodes))
        assert all(text_of(reply.step.pending).startswith("count 2 ") for reply in replies)
    assert host.env_host.host.steps["counter"] == 2 * len(episodes)


async def test_a_deadline_ends_its_step_and_the_others_are_answered_meanwhile(start: Start) -> None:
    host = await start()
    hung, *others = await host.open(size=10, timeout_s=4.0)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, (hung, *others)))
        began = time.monotonic()
        (guilty,) = stream.send([step(hung, 1, "hang")])
        replies = await stream.ask(*(step(episode, 1) for episode in others))
        assert time.monotonic() - began < 3
        assert all(reply.HasField("step") for reply in replies)
        (reply,) = await stream.replies([guilty])
        assert 3.9 < time.monotonic() - began < 8
        assert error_of(reply).reason == "STEP_TIMEOUT"
        replies = await stream.ask(*(step(episode, 2) for episode in others))
        assert all(text_of(reply.step.pending).startswith("count 2 ") for reply in replies)
    assert [(fact.episode, fact.reason) for fact in host.bus.failed] == [(hung, "STEP_TIMEOUT")]


async def test_who_does_not_read_replies_is_not_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "MAX_UNANSWERED", 8)
    monkeypatch.setattr(drive, "_MESSAGE_BYTES", 1)
    # 1 MB an answer: what the connection itself holds is a few of them.
    host = await start({"large": world("Large")})
    episodes = await host.open("large", size=200)
    async with Stream(host) as stream:
        ids = stream.send(map(begin, episodes))
        await wait_until(lambda: sum(_begun(host)) >= 8, what="some are played")
        await asyncio.sleep(1.0)
        assert sum(_begun(host)) < 100
        replies = await stream.replies(ids)
        assert all(reply.HasField("begin") for reply in replies)
        assert set(stream.sizes) == {1}


def _begun(host: Running) -> list[bool]:
    return [episode.first is not None for episode in host.env_host.host._episodes.values()]


async def test_answers_that_do_not_fit_share_no_message(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start({"large": world("Large")})
    small, large = await host.open("large", size=2)
    monkeypatch.setattr(drive, "MAX_MESSAGE_BYTES", 1 << 20)
    async with Stream(host) as stream:
        await stream.ask(begin(small))
        (reply,) = await stream.ask(step(small, 1, "2000000"))
        assert error_of(reply).reason == "MESSAGE_TOO_LARGE"
        (reply,) = await stream.ask(step(small, 2, "10"))
        assert reply.HasField("step")
        await stream.ask(begin(large))


async def test_a_host_that_stops_answers_what_it_was_asked(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    async with Stream(host) as stream:
        await stream.ask(begin(episode))
        ids = stream.send([step(episode, 1, "sleep")])
        await asyncio.sleep(0.2)
        host.env_host.server.request_drain()
        (reply,) = await stream.replies(ids)
        assert text_of(reply.step.pending).startswith("count 1 ")
        with pytest.raises(ConnectionError, match="shutting down"):
            await stream.ask(step(episode, 2))
