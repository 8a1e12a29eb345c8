"""The process launcher by itself: adoption, orphans, logs, folders."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from opentinker_kit.testing import wait_until
from opentinker_scheduler.adapters.processes import ProcessLauncher, Recipe, environment, tail
from opentinker_scheduler.domain.model import Role, Server, ServerOptions, ServerState

PROGRAM = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


class Watch:
    """A launcher and what it said about exits."""

    def __init__(self, folder: Path) -> None:
        self.exits: list[tuple[str, int | None]] = []
        recipe = Recipe(folder, sys.executable, {"trainer": "small_program"}, lambda server, path: {})
        self.launcher = ProcessLauncher(recipe, lambda *exit: self.exits.append(exit))


@pytest.fixture
async def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    (tmp_path / "small_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path / "servers"
    for process in psutil.process_iter():
        try:
            if str(tmp_path) in " ".join(process.cmdline()):
                os.killpg(process.pid, signal.SIGKILL)
        except (psutil.Error, ProcessLookupError):
            continue


def server(name: str = "s1") -> Server:
    now = datetime.now(UTC)
    return Server(name, Role.TRAINER, "m", ServerOptions(), ServerState.LAUNCHING, 1, "process", now)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def child_of(folder: Path, name: str) -> int:
    log = folder / name / "server.log"
    await wait_until(lambda: log.exists() and log.read_text().strip().isdigit(), what="the child runs")
    return int(log.read_text())


async def test_starting_twice_is_starting_once(folder: Path) -> None:
    watch = Watch(folder)
    first = await watch.launcher.start(server())
    assert await watch.launcher.start(server()) == first
    child = await child_of(folder, "s1")
    await watch.launcher.stop("s1", 2.0)
    await wait_until(lambda: not alive(child))
    assert watch.exits == [("s1", -signal.SIGTERM)]
    assert watch.launcher.watched() == ()


async def test_a_process_waits_for_the_end_of_the_one_that_had_its_gpus(folder: Path) -> None:
    watch = Watch(folder)
    await watch.launcher.start(replace(server(), devices=("here/0", "here/1")))
    waiting = asyncio.create_task(watch.launcher.start(replace(server("s2"), devices=("here/1",))))
    given_up = asyncio.create_task(watch.launcher.start(replace(server("s3"), devices=("here/0",))))
    await watch.launcher.start(replace(server("s4"), devices=("here/2",)))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await watch.launcher.stop("s1", 0.0)
    await waiting
    assert set(watch.launcher.watched()) == {"s2", "s4"}
    # Also where the one that had them was found by a successor.
    watch.launcher.close()
    second = Watch(folder)
    await second.launcher.adopt([replace(server("s2"), devices=("here/1",))])
    waiting = asyncio.create_task(second.launcher.start(replace(server("s5"), devices=("here/1",))))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await second.launcher.stop("s2", 0.0)
    await waiting


async def test_a_successor_finds_what_runs(folder: Path) -> None:
    first = Watch(folder)
    started = await first.launcher.start(server())
    child = await child_of(folder, "s1")
    first.launcher.close()
    second = Watch(folder)
    # By what was recorded, or, where that did not come to pass, by the settings file.
    for known in (started.recorded(server()), server()):
        assert await second.launcher.adopt([known]) == {"s1": started}
        second.launcher.close()
    await second.launcher.adopt([server()])
    os.kill(started.pid, signal.SIGKILL)
    await wait_until(lambda: second.exits == [("s1", None)])
    await wait_until(lambda: not alive(child))


async def test_a_pid_that_was_given_to_someone_else_is_not_ours(folder: Path) -> None:
    watch = Watch(folder)
    stranger = replace(server("gone"), pid=os.getpid(), pid_start=1000.0)
    assert await watch.launcher.adopt([stranger]) == {}
    assert alive(os.getpid())


async def test_one_id_with_another_start_time_is_ended(folder: Path) -> None:
    first = Watch(folder)
    started = await first.launcher.start(server())
    await child_of(folder, "s1")
    first.launcher.close()
    second = Watch(folder)
    recorded = replace(started.recorded(server()), pid_start=started.pid_start - 100)
    assert await second.launcher.adopt([recorded]) == {}
    await wait_until(lambda: not alive(started.pid))


async def test_what_a_dead_leader_left_behind_is_ended(folder: Path) -> None:
    first = Watch(folder)
    started = await first.launcher.start(server())
    child = await child_of(folder, "s1")
    first.launcher.close()
    os.kill(started.pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, started.pid, 0)
    assert alive(child)
    await Watch(folder).launcher.adopt([started.recorded(server())])
    await wait_until(lambda: not alive(child))


async def test_others_processes_are_left_alone(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "s1"
    other.mkdir(parents=True)
    argv = [sys.executable, "-m", "small_program", "--settings", str(other / "settings.json")]
    process = await asyncio.to_thread(
        lambda: subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    )
    assert await Watch(folder).launcher.adopt([]) == {}
    await asyncio.sleep(0.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def test_folders_of_ended_servers_do_not_pile_up(folder: Path) -> None:
    for number in range(40):
        (folder / f"old{number:02}").mkdir(parents=True)
        os.utime(folder / f"old{number:02}", (number, number))
    watch = Watch(folder)
    await watch.launcher.start(server())
    kept = sorted(path.name for path in folder.iterdir())
    assert kept[-1] == "s1"
    assert kept[:-1] == [f"old{number:02}" for number in range(24, 40)]
    await watch.launcher.stop("s1", 0.0)


def test_the_environment_does_not_override_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LISTEN_PORT", "READY_FILE", "S3__ENDPOINT", "ENGINE", "THREADS"):
        monkeypatch.setenv(f"OPENTINKER_{name}", "1")
    env = environment({"engine": "noop"})
    assert [name for name in env if name.startswith("OPENTINKER_")] == ["OPENTINKER_THREADS"]
    assert env["PATH"] == os.environ["PATH"]


def test_the_tail_of_a_log_is_short(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == ""
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    assert tail(path).splitlines()[-1] == "line 9999"
    assert len(tail(path).splitlines()) == 15
    path.write_bytes(b"\xff" + b"x" * 100_000)
    assert len(tail(path)) == 1200


def test_the_tail_of_a_log_is_for_every_job_on_the_server(tmp_path: Path) -> None:
    path = tmp_path / "log"
    about = json.dumps({"job": "jobs/a", "event": "secret", "exception": "x" * 300_000})
    path.write_text(f'{about}\n{{"event": "shared"}}\nTraceback\n{{"job": "jobs/a", "event": "secret"}}\n')
    assert tail(path) == '{"event": "shared"}\nTraceback'
    path.write_text(about + "\n")
    assert tail(path) == ""
