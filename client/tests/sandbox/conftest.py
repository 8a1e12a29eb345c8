"""Jails for tests, and the check after each test that nothing of a jail is left."""

import os
import shutil
from collections.abc import Iterator

import pytest

from opentinker.sandbox import Jail, Limits

BRIEF = Limits(wall_s=40, cpu_s=10)
"""Long enough for a busy machine; what is meant to run out is set lower by its test."""


@pytest.fixture(autouse=True)
def no_survivor() -> Iterator[None]:
    """No process of a jail outlives the call that ran it."""
    if shutil.which("bwrap") is None:
        assert not os.environ.get("CI"), "bubblewrap is missing where .ci/run should have installed it"
        pytest.skip("bubblewrap is not installed: apt-get install bubblewrap")
    before = jailed()
    yield
    # At once: who is told that a jail has ended may rely on it.
    assert survivors(before) == {}


@pytest.fixture(scope="session")
def jail() -> Jail:
    """A jail with limits that nothing ordinary meets."""
    return Jail(BRIEF)


def jailed() -> set[int]:
    """Processes in other process namespaces than ours, and bubblewraps."""
    return {
        pid
        for pid in _pids()
        if _name(pid) == "bwrap" or _namespace(pid) not in ("", _namespace(os.getpid()))
    }


def survivors(before: set[int]) -> dict[int, str]:
    """What is jailed now, was not before, and belongs to nobody else who runs jails on this machine."""
    return {pid: _name(pid) for pid in jailed() - before if not _elsewhere(pid)}


def _elsewhere(pid: int) -> bool:
    """Whether it descends from a bubblewrap whose parent lives and is not us."""
    while pid > 1:
        parent = _parent(pid)
        if pid == os.getpid() or parent == os.getpid():
            return False
        if _name(pid) == "bwrap" and parent > 1:
            return True
        pid = parent
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
