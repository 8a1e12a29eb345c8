"""What nothing may be left of: abandoned episodes, forks, suspects of a death, a journal on a full disk."""

import asyncio
import gc
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from services.env_host.tests.conftest import Start, stop, text_of, world
from services.env_host.tests.test_drive import Stream, begin, error_of, step
from services.env_host.tests.test_journal import _episode, _kept

from opentinker_env_host.adapters.journal import FileJournal
from opentinker_env_host.domain.episode import Episode
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import env_host_service_pb2 as pb

LIVE = 500


def reasons(replies: list[pb.DriveReply]) -> Counter[str]:
    return Counter(
        error_of(reply).metadata["end_reason"] if reply.HasField("error") else "" for reply in replies
    )


def episodes_in_memory() -> int:
    gc.collect()
    return sum(isinstance(each, Episode) for each in gc.get_objects())


@pytest.mark.slow
async def test_of_a_thousand_abandoned_episodes_nothing_is_left(start: Start, tmp_path: Path) -> None:
    """B110: neither on the host nor in its workers nor in its journal."""
    worlds = {"census": world("Census")}
    host = await start(worlds, max_workers=1, episodes_per_worker=1000, state_dir=tmp_path)
    episodes = await host.open("census", size=1000, ttl_s=3.0)
    async with Stream(host) as stream:
        replies = await stream.ask(*map(begin, episodes))
        assert {text_of(reply.begin.pending) for reply in replies} == {f"{n} of us" for n in range(1, 1001)}
        await stream.ask(*(step(episode, 1) for episode in episodes[:500]))
    del replies
    await wait_until(lambda: host.env_host.host.open_episodes == 0, 30, what="all are reaped")
    assert Counter(fact.reason for fact in host.bus.failed) == {"LEASE_EXPIRED": 1000}
    (seat,) = host.env_host.host._pools["census"]._seats
    await wait_until(lambda: not seat.episodes, what="the worker has none left")
    await wait_until(lambda: not host.env_host.host._background._running, what="nothing runs")
    assert episodes_in_memory() == 0
    (last,) = await host.open("census")
    assert await host.begin(last) == "1 of us"
    await host.close([last])
    await stop(host)
    after = await start(worlds, state_dir=tmp_path)
    assert after.env_host.host.open_episodes == 0
    assert (tmp_path / "episodes.journal").read_bytes() == b""


@pytest.mark.slow
async def test_of_500_episodes_played_by_a_call_each_a_dead_worker_costs_none(start: Start) -> None:
    """B108, without a stream."""
    host = await start()
    episodes = await host.open(size=LIVE, timeout_s=2.0)
    await asyncio.gather(*map(host.begin, episodes))
    await wait_until(lambda: len(host.workers()) == 4, 60, what="4 workers")
    killed, stopped = (worker.pid for worker in host.workers()[:2])
    os.kill(killed, signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    answers: list[Any] = await asyncio.gather(
        *(host.step(episode, 1, "go") for episode in episodes), return_exceptions=True
    )
    late = [error for error in answers if isinstance(error, BaseException)]
    assert {error.metadata["end_reason"] for error in late} <= {"STEP_TIMEOUT"}
    assert len(late) <= 4
    good = [
        name for name, answer in zip(episodes, answers, strict=True) if not isinstance(answer, BaseException)
    ]
    seen = await asyncio.gather(*(host.step(episode, 2, "go") for episode in good))
    assert {text_of(answer.pending).split()[1] for answer in seen} == {"2"}
    await wait_until(lambda: bool(host.workers()), what="the pool refills")


@pytest.mark.slow
async def test_many_suspects_of_a_death_are_tried_in_a_few_workers(start: Start) -> None:
    """A worker that dies under many `async` steps leaves a suspect for each; one killed it, and only that one
    ends.
    """
    host = await start({"waiting": world("Waiting")}, max_workers=2, episodes_per_worker=200)
    episodes = await host.open("waiting", size=24, timeout_s=20.0)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, episodes))
        ids = stream.send(step(episode, 1, "0.4") for episode in episodes)
        await asyncio.sleep(0.2)
        os.kill(host.workers("waiting")[0].pid, signal.SIGKILL)
        most = 0
        replies = asyncio.create_task(stream.replies(ids))
        while not replies.done():
            await asyncio.sleep(0.02)
            most = max(most, len(host.workers("waiting")))
        assert reasons(await replies) == {"": 24}
        assert most <= 5
    assert not host.bus.failed


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_async_step_that_never_lets_go_ends_alone(start: Start, at_once: bool) -> None:
    """It holds the event loop of its worker: whoever waits there is late, and is played again elsewhere."""
    host = await start({"jam": world("Jam")}, max_workers=1)
    hung, *others = await host.open("jam", size=20, timeout_s=1.5)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, (hung, *others)))
        calls = [step(hung, 1, "jam"), *(step(episode, 1, "0.1") for episode in others)]
        # Those that were asked first are late before it is.
        order = calls if at_once else [*calls[1:], calls[0]]
        ids = stream.send(order)
        replies = dict(zip(map(id, order), await stream.replies(ids), strict=True))
    assert error_of(replies.pop(id(calls[0]))).reason == "STEP_TIMEOUT"
    assert reasons(list(replies.values())) == {"": 19}
    assert [(fact.episode, fact.reason) for fact in host.bus.failed] == [(hung, "STEP_TIMEOUT")]


@pytest.mark.slow
async def test_who_waited_behind_an_async_step_has_that_much_more_time(start: Start) -> None:
    host = await start({"jam": world("Jam")}, max_workers=1)
    holding, other, late = await host.open("jam", size=3, timeout_s=1.5)
    async with Stream(host) as stream:
        await stream.ask(*map(begin, (holding, other, late)))
        (waits,) = stream.send([step(other, 1, "1.2")])
        await asyncio.sleep(0.3)
        (holds,) = stream.send([step(holding, 1, "hold 1.3")])
        held, waited = await stream.replies([holds, waits])
        assert reasons([held, waited]) == {"": 2}
        # What is late of itself still ends in its time.
        began = time.monotonic()
        (reply,) = await stream.ask(step(late, 1, "60"))
        assert error_of(reply).reason == "STEP_TIMEOUT"
        assert time.monotonic() - began < 4


async def test_a_child_that_outlives_its_worker_does_not_hide_its_death(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    await host.step(episode, 1, "daemon")
    began = time.monotonic()
    os.kill(host.workers()[0].pid, signal.SIGKILL)
    answer = await host.step(episode, 2, "go")
    assert answer.replayed
    assert time.monotonic() - began < 5


async def test_a_worker_on_trial_leaves_room_for_the_others(start: Start) -> None:
    """The one that is suspected may live long; a pool of one worker still serves everybody else."""
    host = await start({"counter": world("Counter")}, max_workers=1, worker_wait_s=5.0)
    suspect, other = await host.open(size=2)
    await asyncio.gather(host.begin(suspect), host.begin(other))
    sleeping = asyncio.create_task(host.step(suspect, 1, "sleep"))
    await asyncio.sleep(0.2)
    os.kill(host.workers()[0].pid, signal.SIGKILL)
    assert (await sleeping).replayed
    assert text_of((await host.step(other, 1, "go")).pending).startswith("count 1 ")
    (new,) = await host.open()
    await host.begin(new)
    assert text_of((await host.step(suspect, 2, "go")).pending).startswith("count 2 ")


def test_a_full_disk_ends_no_episode_and_the_journal_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes.journal"
    journal = FileJournal(path)
    journal.load()
    journal.opened([_episode("e", -1)])
    real = os.write

    def full(fd: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    journal.begun(_episode("e", 0))
    journal.stepped(_episode("e", 1))
    journal.tidy([_episode("e", 1)])
    monkeypatch.setattr(os, "write", real)
    journal.stepped(_episode("e", 2))
    journal.tidy([_episode("e", 2)])
    journal.stepped(_episode("e", 3))
    journal.close()
    assert _kept(path) == {"e": (3, "first", b"\x00key", "jobs/j")}


@pytest.mark.parametrize("cut", [1, 7, 40, 200])
def test_any_torn_tail_leaves_whole_episodes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "episodes.journal"
    journal = FileJournal(path)
    journal.load()
    for name in ("a", "b"):
        journal.opened([_episode(name, -1)])
        journal.begun(_episode(name, 0))
        for seq in range(1, 5):
            journal.stepped(_episode(name, seq))
    journal.close()
    whole = path.read_bytes()
    for tail in (b"", b"\x00\xff\x00", b"[]\n", b'["step","b",99,{},"d","",false]\n', b"[" * 100_000):
        path.write_bytes(whole[:-cut] + tail)
        kept = _kept(path)
        assert kept["a"][0] == 4
        assert 0 <= kept["b"][0] <= 4
        assert all(line.startswith(b"[") for line in path.read_bytes().splitlines())
