"""Processes below the supervisor that it did not start itself, read from /proc."""

import contextlib
import os
import signal
import time
from pathlib import Path


def reap_strangers(own: set[int]) -> None:
    """Reap ended children that were handed to this process as their subreaper.

    Those in `own` are left to the Popen objects that started them.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            # One of our own comes first: its owner polls it soon, and the others are reaped after that.
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ended.si_pid, 0)


def descendants(root: int | None = None) -> list[int]:
    """Pids of all processes below `root` (by default this process), parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold spaces and parentheses; the parent is the second field after
            # it.
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [os.getpid() if root is None else root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def kill_descendants(timeout_s: float = 3.0) -> None:
    """Kill everything below this process and reap what becomes its child."""
    deadline = time.monotonic() + timeout_s
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_strangers(set())
        time.sleep(0.02)
