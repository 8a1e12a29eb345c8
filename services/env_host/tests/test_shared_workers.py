"""Workers that many episodes share: steps that block, hang or leave, and what 500 episodes see of it."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import psutil
import pytest
from pydantic import ValidationError
from services.env_host.tests.conftest import WORLDS, Running, Start, text_of, world
from services.env_host.tests.test_drive import Stream, begin, error_of, step

from opentinker_env_host.settings import EnvironmentSettings
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.runtime.errors import EnvironmentCrashed

LIVE = 500


async def test_steps_that_block_overlap_in_one_worker(start: Start) -> None:
    host = await start(max_workers=1)
    episodes = await host.open(size=16, options_json='{"tell_process": true}')
    async with Stream(host) as stream:
        first = await stream.ask(*map(begin, episodes))
        began = time.monotonic()
        replies = await stream.ask(*(step(episode, 1, "sleep") for episode in episodes))
        # One after the other they take 8 s.
        assert time.monotonic() - began < 4
        light = time.monotonic()
        await stream.ask(*(step(episode, 2) for episode in episodes))
        assert time.monotonic() - light < 2
    seen = {text_of(reply.begin.pending).split()[-1] for reply in first}
    seen |= {text_of(reply.step.pending).split()[-1] for reply in replies}
    assert len(seen) == 1
    assert len(host.workers()) == 1


async def test_a_step_that_blocks_does_not_hold_up_those_behind_it(start: Start) -> None:
    host = await start(max_workers=1)
    slow, *light = await host.open(size=20)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, (slow, *light)))
        began = time.monotonic()
        (waiting,) = stream.send([step(slow, 1, "sleep")])
        await stream.ask(*(step(episode, 1) for episode in light))
        assert time.monotonic() - began < 0.4
        await stream.replies([waiting])


async def test_with_one_thread_steps_come_one_after_the_other(start: Start) -> None:
    host = await start({"counter": world("Counter", threads=1)}, max_workers=1)
    # Each has a second of its own, from when the worker gets to it.
    episodes = await host.open(size=4, timeout_s=1.0)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, episodes))
        began = time.monotonic()
        replies = await stream.ask(*(step(episode, 1, "sleep") for episode in episodes))
        assert time.monotonic() - began > 1.9
    assert all(reply.HasField("step") for reply in replies)


def test_threads_are_refused_where_they_mean_nothing() -> None:
    with pytest.raises(ValidationError, match="threads: an exclusive worker"):
        EnvironmentSettings(target="worlds:Counter", exclusive=True, threads=2)


@pytest.mark.parametrize("threads", [1, 8])
async def test_async_steps_that_block_overlap_on_as_many_loops(start: Start, threads: int) -> None:
    host = await start({"blocking": world("Blocking", threads=threads)}, max_workers=1)
    episodes = await host.open("blocking", size=8)
    async with Stream(host) as stream:
        first = await stream.ask(*map(begin, episodes))
        began = time.monotonic()
        replies = await stream.ask(*(step(episode, 1, "0.3") for episode in episodes))
        past = time.monotonic() - began
        assert past > 2.3 if threads == 1 else past < 1.5
        # An episode stays on its loop, and as many are used as there may be.
        loops = [text_of(reply.begin.pending) for reply in first]
        assert [text_of(reply.step.pending) for reply in replies] == loops
        assert len(set(loops)) == threads
        await host.close(episodes)
        (next_one,) = await host.open("blocking")
        (reply,) = await stream.ask(begin(next_one))
        assert text_of(reply.begin.pending) in loops


async def test_a_step_that_leaves_the_program_ends_its_episode_only(start: Start) -> None:
    host = await start(max_workers=1)
    leaving, other = await host.open(size=2)
    for episode in (leaving, other):
        await host.begin(episode)
    (worker,) = host.workers()
    with pytest.raises(EnvironmentCrashed, match="SystemExit: enough"):
        await host.step(leaving, 1, "exit")
    assert not (await host.step(other, 1, "go")).replayed
    assert host.workers() == [worker]


async def begun(stream: Stream, host: Running, environment: str, seed: int = 0) -> list[str]:
    """500 live episodes."""
    episodes = await host.open(environment, size=LIVE, seed=seed, timeout_s=2.0)
    replies = await stream.ask(*map(begin, episodes))
    assert all(reply.HasField("begin") for reply in replies)
    return episodes


def reasons(replies: Iterable[pb.DriveReply]) -> Counter[str]:
    return Counter(
        error_of(reply).metadata["end_reason"] if reply.HasField("error") else "" for reply in replies
    )


async def stopped_or_killed(host: Running, environment: str) -> tuple[int, int]:
    """Kill one worker and stop another; their process ids."""
    await wait_until(lambda: len(host.workers(environment)) == 4, 60, what="4 workers")
    killed, stopped = (worker.pid for worker in host.workers(environment)[:2])
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    return killed, stopped


async def test_of_500_episodes_that_repeat_themselves_a_dead_worker_costs_none(start: Start) -> None:
    host = await start()
    async with Stream(host) as stream:
        episodes = await begun(stream, host, "counter")
        before = await stream.ask(*(step(episode, 1) for episode in episodes))
        pids = await stopped_or_killed(host, "counter")
        after = await stream.ask(*(step(episode, 2) for episode in episodes))
        # What ran in the stopped one is late: one step, or as many as it had threads by then.
        ended = reasons(after)
        assert set(ended) == {"", "STEP_TIMEOUT"}
        assert ended["STEP_TIMEOUT"] <= 4
        good = [index for index, reply in enumerate(after) if reply.HasField("step")]
        assert {text_of(after[index].step.pending).split()[1] for index in good} == {"2"}
        assert len({text_of(reply.step.pending) for reply in before}) == 1
        again = await stream.ask(*(step(episodes[index], 3) for index in good))
        assert reasons(again) == {"": ended[""]}
    await gone(pids)
    await wait_until(lambda: bool(host.workers()), what="the pool refills")


async def test_of_500_episodes_that_do_not_a_dead_worker_costs_its_own(start: Start) -> None:
    host = await start({"honest": world("Honest")})
    async with Stream(host) as stream:
        episodes = await begun(stream, host, "honest")
        pool = host.env_host.host._pools["honest"]
        await wait_until(lambda: len(pool.workers) == 4, 60, what="4 workers")
        on = {seat.worker.pid: set(seat.episodes) for seat in pool._seats}  # type: ignore[attr-defined]
        pids = await stopped_or_killed(host, "honest")
        theirs = on[pids[0]] | on[pids[1]]
        assert 0 < len(theirs) < LIVE
        after = await stream.ask(*(step(episode, 1) for episode in episodes))
        ended = {episode for episode, reply in zip(episodes, after, strict=True) if reply.HasField("error")}
        assert ended == theirs
        assert set(reasons(after)) == {"", "SANDBOX_LOST", "STEP_TIMEOUT"}
        live = sorted(set(episodes) - theirs)
        assert reasons(await stream.ask(*(step(episode, 2) for episode in live))) == {"": len(live)}
    assert {fact.episode for fact in host.bus.failed} == theirs
    await gone(pids)


async def gone(pids: Sequence[int]) -> None:
    await wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), what="they are gone")


@pytest.mark.slow
async def test_abandoned_episodes_are_reaped_by_the_thousand(start: Start) -> None:
    host = await start({"counter": world("Counter")})
    async with Stream(host) as stream:
        episodes = await host.open(size=1000, ttl_s=3.0)
        replies = await stream.ask(*map(begin, episodes))
        assert reasons(replies) == {"": 1000}
    await wait_until(lambda: host.env_host.host.open_episodes == 0, 30, what="all are reaped")
    assert Counter(fact.reason for fact in host.bus.failed) == {"LEASE_EXPIRED": 1000}
    seats = host.env_host.host._pools["counter"]._seats
    await wait_until(lambda: not any(seat.episodes for seat in seats), what="the workers have none left")


async def test_an_environment_from_another_folder(start: Start) -> None:
    """`path` and `threads` reach the worker together."""
    host = await start({"counter": EnvironmentSettings(target="worlds:Counter", path=(WORLDS,), threads=3)})
    episodes = await host.open(size=3)
    await asyncio.gather(*(host.begin(episode) for episode in episodes))
    began = time.monotonic()
    await asyncio.gather(*(host.step(episode, 1, "sleep") for episode in episodes))
    assert time.monotonic() - began < 1.4
