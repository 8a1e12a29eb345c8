"""Untrusted code in hosted episodes, and what the host says about its jails."""

import os
import signal
from pathlib import Path

import pytest
from services.env_host.tests.conftest import WORLDS, Start, text_of

from opentinker_env_host.adapters.sandbox_probe import SandboxProbe
from opentinker_env_host.settings import EnvironmentSettings
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import capabilities_pb2 as pb

CODER = {"coder": EnvironmentSettings(target="coder:Coder", path=(WORLDS,))}
OWN_MODE = pb.SANDBOX_MODE_SLOT_UID if os.geteuid() == 0 else pb.SANDBOX_MODE_USER_NAMESPACE


def jails_of(worker: int) -> list[int]:
    """The bubblewraps that a process has started."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text()
        except OSError:
            continue
        if "(bwrap)" in stat and int(stat.rpartition(")")[2].split()[1]) == worker:
            found.append(int(name))
    return found


def lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def test_the_host_names_the_mode(start: Start) -> None:
    host = await start()
    for _ in range(2):
        said = await host.call(host.stub.GetCapabilities(pb.GetCapabilitiesRequest()))
        assert (said.sandbox_mode, said.sandbox_error) == (OWN_MODE, "")
        assert said.sandbox_version.startswith("bubblewrap")


async def test_a_host_without_bubblewrap_says_what_to_install(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    host = await start(CODER)
    said = await host.call(host.stub.GetCapabilities(pb.GetCapabilitiesRequest()))
    assert said.sandbox_mode == pb.SANDBOX_MODE_NONE
    assert "apt-get install bubblewrap" in said.sandbox_error
    # No jail, no tool: the episode ends, and nothing ran.
    (episode,) = await host.open("coder")
    with pytest.raises(Exception, match="apt-get install bubblewrap"):
        await host.begin(episode)
    monkeypatch.setenv("PATH", path)
    said = await host.call(host.stub.GetCapabilities(pb.GetCapabilitiesRequest()))
    assert said.sandbox_mode == OWN_MODE


@pytest.mark.parametrize("program", ["exit 0", "echo '[]'", "exec sleep 600", "printf x"])
async def test_an_interpreter_that_says_nothing_useful_is_told(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentinker_env_host.adapters.sandbox_probe.TIMEOUT_S", 1.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    facts = await SandboxProbe(python).facts()
    assert (facts.mode, bool(facts.error)) == ("", True)
    assert (await SandboxProbe(tmp_path / "none").facts()).error


async def test_hosted_episodes_run_code_and_leave_nothing(start: Start) -> None:
    host = await start(CODER)
    first, second = await host.open("coder", size=2)
    for episode in (first, second):
        await host.begin(episode)
        await host.step(episode, 1, f"x = {episode!r}")
        assert text_of((await host.step(episode, 2, "x")).pending) == repr(episode)
    (worker,) = host.workers("coder")
    held = jails_of(worker.pid)
    assert len(held) == 2
    await host.close([first])
    await wait_until(lambda: len(jails_of(worker.pid)) == 1, what="the closed episode's jail is gone")
    os.kill(worker.pid, signal.SIGKILL)
    await worker.wait()
    await wait_until(lambda: not any(map(lives, held)), what="the worker's jails are gone")
    # Played again from its seed and actions on another worker.
    assert text_of((await host.step(second, 3, "x + '!'")).pending) == repr(f"{second}!")
