"""The stack when something in it, or around it, is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opentinker_kit.testing import wait_until_sync
from opentinker_local import StackInfo, attach, stop_stack
from opentinker_local.state import StateDir

from .conftest import FAKE, StartFake
from .looking import addresses, alive, gone, listening, store, tree

OWNER = """
import sys, time
from pathlib import Path
from opentinker_local import start_stack
info = start_stack(Path(sys.argv[1]), command=sys.argv[2:])
print("ready", flush=True)
time.sleep(1000)
"""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("part", ["scheduler", "env_host", "nats", "s3"])
async def test_a_killed_part_comes_back_at_its_address_with_its_data(
    start_fake: StartFake, part: str
) -> None:
    info = start_fake()
    objects = store(info)
    await objects.put("kept", b"bytes")
    await asyncio.to_thread(kill, info.pids[part])

    def is_back() -> bool:
        now = StateDir(info.state_dir).read_stack()
        return now is not None and now.pids.get(part, info.pids[part]) != info.pids[part]

    await asyncio.to_thread(wait_until_sync, is_back, 20)
    now = attach(info.state_dir)
    assert addresses(now) == addresses(info)
    assert all(map(listening, (now.scheduler, now.env_host, now.nats.removeprefix("nats://"), now.s3)))
    assert {name: pid for name, pid in now.pids.items() if name != part} == {
        name: pid for name, pid in info.pids.items() if name != part
    }
    assert await objects.get("kept") == b"bytes"


def test_b110_a_killed_supervisor_leaves_no_process_and_no_port(start_fake: StartFake) -> None:
    info = start_fake(owned=False)
    pids = tree(info.supervisor_pid)
    kill(info.supervisor_pid)
    wait_until_sync(lambda: gone(pids, info), 10)
    # The next one starts on what was left.
    again = start_fake()
    assert again.scheduler == info.scheduler
    assert not list(Path("/tmp").glob("seaweedfs-*.sock")) or listening(again.s3)


def test_b110_a_killed_owner_takes_its_stack_along(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OWNER, str(tmp_path / "stack"), *FAKE]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        info = attach(tmp_path / "stack")
        pids = tree(info.supervisor_pid)
        owner.kill()
        owner.wait()
    wait_until_sync(lambda: gone(pids, info), 10)
    assert StateDir(info.state_dir).holder() is None


def test_b110_servers_that_ignore_signals_go_with_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_SERVICE_MODE", "stubborn")
    test_b110_a_killed_owner_takes_its_stack_along(tmp_path)


def test_what_a_killed_part_had_started_stays_with_the_supervisor(
    start_fake: StartFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainer servers do when the scheduler dies: adopted, and gone with the stack."""
    monkeypatch.setenv("KIT_SERVICE_MODE", "spawn")
    info = start_fake()
    orphans = tree(info.pids["scheduler"]) - {info.pids["scheduler"]}
    assert len(orphans) == 1
    kill(info.pids["scheduler"])
    wait_until_sync(lambda: attach(info.state_dir).pids["scheduler"] != info.pids["scheduler"], 20)
    assert orphans <= tree(info.supervisor_pid)
    # One that ends meanwhile is reaped, so that nobody takes its pid for a living process.
    for pid in orphans:
        kill(pid)
    wait_until_sync(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans), 5)


def test_b111_five_stacks_start_at_once(start_fake: StartFake, tmp_path: Path) -> None:
    with ThreadPoolExecutor(5) as pool:
        infos: list[StackInfo] = list(pool.map(start_fake, [tmp_path / f"stack-{i}" for i in range(5)]))
    everything = [address for info in infos for address in addresses(info)]
    assert len(everything) == len(set(everything)) == 5 * 14
    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(stop_stack, [info.state_dir for info in infos]))
    assert not any(alive(info.supervisor_pid) for info in infos)
