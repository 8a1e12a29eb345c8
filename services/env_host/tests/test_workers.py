"""Worker processes that die, hang and stop (field bug B108), and what becomes of their episodes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from services.env_host.tests.conftest import WORLDS, Running, Start, text_of, world

from opentinker_env_host.adapters.worker_process import worker_environment
from opentinker_env_host.settings import EnvironmentSettings
from opentinker_kit.testing.waiting import wait_until, wait_until_sync
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import (
    EnvironmentCrashed,
    EpisodeNotFound,
    MissingDependency,
    Overloaded,
    StepTimeout,
)


async def play(host: Running, episode: str, steps: int, first_seq: int = 1) -> list[str]:
    """Take some steps; what was seen."""
    return [
        text_of((await host.step(episode, seq, "go")).pending) for seq in range(first_seq, first_seq + steps)
    ]


async def test_episodes_of_a_killed_worker_go_on_as_if_nothing_had_been(start: Start) -> None:
    host = await start()
    undisturbed, *others = await host.open(size=4, seed=11)
    for episode in (undisturbed, *others):
        await host.begin(episode)
    expected = await play(host, undisturbed, 6)
    for episode in others:
        assert await play(host, episode, 3) == expected[:3]
    (worker,) = host.workers()
    os.kill(worker.pid, signal.SIGKILL)
    answers = await asyncio.gather(*(host.step(episode, 4, "go") for episode in others))
    assert [text_of(answer.pending) for answer in answers] == [expected[3]] * 3
    assert all(answer.replayed for answer in answers)
    for episode in others:
        assert await play(host, episode, 2, first_seq=5) == expected[4:]
    assert not (await host.step(others[0], 7, "go")).replayed
    # The stored answer of the undisturbed one is still there, and so is its episode.
    assert text_of((await host.step(undisturbed, 6, "go")).pending) == expected[5]
    assert not host.bus.failed


async def test_a_worker_killed_in_the_middle_of_a_step(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    step = asyncio.create_task(host.step(episode, 1, "sleep"))
    await asyncio.sleep(0.2)
    os.kill(host.workers()[0].pid, signal.SIGKILL)
    answer = await step
    assert answer.replayed is True
    assert text_of(answer.pending).startswith("count 1 ")


@pytest.mark.parametrize("how", ["endless loop", "SIGSTOP"])
async def test_a_hung_worker_ends_the_step_as_timeout_and_others_go_on(start: Start, how: str) -> None:
    host = await start()
    hung, waiting, other = await host.open(size=3, timeout_s=1.0)
    for episode in (hung, waiting, other):
        await host.begin(episode)
        await host.step(episode, 1, "go")
    worker = host.workers()[0]
    if how == "SIGSTOP":
        os.kill(worker.pid, signal.SIGSTOP)
    began = time.monotonic()
    guilty = asyncio.create_task(host.step(hung, 2, "hang" if how == "endless loop" else "go"))
    await asyncio.sleep(0.3)
    # Behind the hung one in the same worker: its own deadline starts when the worker gets to it.
    behind = asyncio.create_task(host.step(waiting, 2, "go"))
    with pytest.raises(StepTimeout) as raised:
        await guilty
    assert 0.9 < time.monotonic() - began < 3
    assert raised.value.metadata["end_reason"] == "STEP_TIMEOUT"
    assert text_of((await behind).pending).startswith("count 2 ")
    assert text_of((await host.step(other, 2, "go")).pending).startswith("count 2 ")
    with pytest.raises(StepTimeout):
        await host.step(hung, 3, "go")
    await wait_until(lambda: not psutil.pid_exists(worker.pid) and bool(host.workers()), what="pool refilled")
    assert [(fact.episode, fact.reason) for fact in host.bus.failed] == [(hung, "STEP_TIMEOUT")]


async def test_a_step_that_kills_its_worker_twice_ends_its_episode_only(start: Start, tmp_path: Path) -> None:
    host = await start()
    deadly, other = await host.open(size=2)
    for episode in (deadly, other):
        await host.begin(episode)
    doomed = asyncio.create_task(host.step(deadly, 1, "die"))
    beside = await asyncio.gather(*(play(host, other, 1), play(host, other, 1)))
    with pytest.raises(EnvironmentCrashed, match="died twice") as raised:
        await doomed
    assert raised.value.metadata["end_reason"] == "ENV_CRASH"
    assert beside[0] == beside[1]
    assert text_of((await host.step(other, 2, "go")).pending).startswith("count 2 ")
    # One that kills it once only is played again and goes on.
    options = json.dumps({"flag": str(tmp_path / "flag")})
    (once,) = await host.open(options_json=options)
    await host.begin(once)
    await host.step(once, 1, "go")
    answer = await host.step(once, 2, "die once")
    assert answer.replayed
    assert text_of(answer.pending).startswith("count 2 ")


@pytest.mark.parametrize(
    ("environment", "why"), [("forgetful", "came out differently"), ("honest", "promise")]
)
async def test_what_cannot_be_repeated_is_reported_lost_and_never_scored(
    start: Start, environment: str, why: str
) -> None:
    host = await start({environment: world(environment.capitalize())})
    (episode,) = await host.open(environment)
    await host.begin(episode)
    await host.step(episode, 1, "go")
    os.kill(host.workers(environment)[0].pid, signal.SIGKILL)
    with pytest.raises(EnvironmentCrashed, match=why) as raised:
        await host.step(episode, 2, "go")
    assert raised.value.metadata["end_reason"] == "SANDBOX_LOST"
    with pytest.raises(EnvironmentCrashed, match=why):
        await host.finalize(episode)
    assert [fact.reason for fact in host.bus.failed] == ["SANDBOX_LOST"]


async def test_an_exclusive_environment_has_a_process_for_each_episode(start: Start) -> None:
    host = await start({"counter": world("Counter", exclusive=True)}, max_exclusive_workers=2)
    episodes = await host.open(size=3, options_json='{"tell_process": true}')
    first, second = [await host.begin(episode) for episode in episodes[:2]]
    assert first.split()[-1] != second.split()[-1]
    third = asyncio.create_task(host.begin(episodes[2]))
    await asyncio.sleep(0.3)
    assert not third.done()
    await host.close(episodes[:1])
    assert (await third).split()[-1] not in (first.split()[-1], second.split()[-1])


async def test_an_episode_that_finds_no_worker_may_come_back(start: Start) -> None:
    host = await start(
        {"counter": world("Counter", exclusive=True)}, max_exclusive_workers=1, worker_wait_s=0.2
    )
    first, second = await host.open(size=2)
    await host.begin(first)
    with pytest.raises(Overloaded):
        await host.begin(second)
    await host.close([first])
    await wait_until(lambda: len(host.workers()) == 1)
    await host.begin(second)


async def test_workers_retire_after_enough_episodes(start: Start) -> None:
    host = await start(recycle_episodes=3)
    first = host.workers()[0].pid
    seen = set()
    for _ in range(4):
        (episode,) = await host.open(options_json='{"tell_process": true}')
        seen.add(int((await host.begin(episode)).split()[-1]))
        await host.close([episode])
    assert first in seen
    assert len(seen) == 2
    await wait_until(lambda: not psutil.pid_exists(first))


async def test_async_environments_overlap_in_one_worker(start: Start) -> None:
    host = await start({"waiting": world("Waiting")})
    episodes = await host.open("waiting", size=10)
    for episode in episodes:
        await host.begin(episode)
    began = time.monotonic()
    answers = await asyncio.gather(*(host.step(episode, 1, "0.5") for episode in episodes))
    assert time.monotonic() - began < 2.5
    assert all(answer.truncated for answer in answers)
    assert len(host.workers("waiting")) == 1


async def test_many_episodes_are_spread_over_several_workers(start: Start) -> None:
    host = await start(episodes_per_worker=4, max_workers=2)
    episodes = await host.open(size=12, options_json='{"tell_process": true}')
    seen = [(await host.begin(episode)).split()[-1] for episode in episodes]
    assert sorted(seen.count(pid) for pid in set(seen)) == [6, 6]


async def test_what_it_prints_goes_to_the_workers_log_and_harms_nothing(start: Start, tmp_path: Path) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    await host.step(episode, 1, "print")
    (log,) = (tmp_path / "state-0" / "logs" / "workers").glob("counter-*.log")
    assert "hello from the environment" in log.read_text()


async def test_killing_a_worker_kills_what_it_started(start: Start) -> None:
    host = await start()
    (episode,) = await host.open(timeout_s=1.0)
    await host.begin(episode)
    await host.step(episode, 1, "fork")
    group = host.workers()[0].pid
    started = [process for process in psutil.process_iter() if _group(process) == group != process.pid]
    assert started
    with pytest.raises(StepTimeout):
        await host.step(episode, 2, "hang")
    await wait_until(lambda: not any(_lives(process) for process in started))


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_worker_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert "secret" not in worker_environment().values()


async def test_draining_takes_no_new_episodes_and_ends_the_workers(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    pids = [worker.pid for worker in host.workers()]
    host.env_host.host.draining = True
    with pytest.raises(ConnectionError, match="shutting down"):
        await host.open()
    await host.step(episode, 1, "go")
    await host.env_host.stop()
    await wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_workers_die_with_their_host_even_in_an_endless_loop(tmp_path: Path) -> None:
    settings = tmp_path / "env_host.json"
    ready = tmp_path / "ready.json"
    settings.write_text(
        json.dumps(
            {
                "environments": {"counter": {"target": "worlds:Counter", "path": [str(WORLDS)]}},
                "ready_file": str(ready),
                "state_dir": str(tmp_path / "state"),
            }
        )
    )
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(settings)]
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen(command, stderr=log) as process:  # noqa: ASYNC220
        try:
            wait_until_sync(ready.exists, 30, what="env_host is ready")
            report = json.loads(ready.read_text())
            assert report["pid"] == process.pid
            async with open_channel(f"127.0.0.1:{report['port']}") as channel:
                host = Running(None, channel, None)  # type: ignore[arg-type]
                (episode,) = await host.open()
                await host.begin(episode)
                hang = asyncio.create_task(host.step(episode, 1, "hang"))
                await asyncio.sleep(0.3)
                workers = psutil.Process(process.pid).children(recursive=True)
                assert workers
                process.kill()
                with pytest.raises(ConnectionError):
                    await hang
        finally:
            process.kill()
    wait_until_sync(lambda: not any(worker.is_running() for worker in workers), 10, what="workers are gone")


async def test_an_environment_that_could_not_be_played_is_tried_again(start: Start, tmp_path: Path) -> None:
    late = EnvironmentSettings(target="late:Counter", path=(tmp_path, WORLDS))
    host = await start({"counter": late})
    with pytest.raises(MissingDependency, match="No module named 'late'"):
        await host.open()
    (tmp_path / "late.py").write_text("from worlds import Counter")
    await wait_until(lambda: bool(host.workers()), 20)
    await host.open()


def test_the_host_imports_neither_the_client_nor_an_environment() -> None:
    code = (
        "import sys, opentinker_env_host.__main__; "
        "print([name for name in sys.modules if name.split('.')[0] == 'opentinker'])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


async def test_a_restarted_host_knows_no_old_episodes(start: Start) -> None:
    host = await start()
    with pytest.raises(EpisodeNotFound, match="restarted"):
        await host.begin("episodes/0123-0")
