"""Processes that must not outlive who started them.

The supervisor of a stack holds the only write end of a pipe, the lifeline. Our own processes inherit its read
end and end when it closes, however the supervisor died. Programs that know nothing of lifelines get a signal
from the kernel instead (`die_with_parent`).
"""

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def watch_lifeline(fd: int, on_eof: Callable[[], None]) -> threading.Thread:
    """Call `on_eof` once, from a daemon thread, when every write end of the pipe behind `fd` is closed.

    OSError if `fd` is no open descriptor: a process that cannot watch its lifeline must not start.
    """
    os.fstat(fd)
    thread = threading.Thread(target=_watch, args=(fd, on_eof), name="lifeline", daemon=True)
    thread.start()
    return thread


def _watch(fd: int, on_eof: Callable[[], None]) -> None:
    # The pipe carries no data; a closed descriptor (EBADF) means that this process is shutting down itself.
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    while True:
        for _, events in poll.poll():
            if events & select.POLLNVAL:
                return
            if events & (select.POLLHUP | select.POLLERR):
                on_eof()
                return
            if events & select.POLLIN and os.read(fd, 4096) == b"":
                on_eof()
                return


def exit_at_eof(fd: int, status: int = 70) -> threading.Thread:
    """End this process, and its group where it leads one, when the lifeline closes. Nothing is cleaned up."""

    def end() -> None:
        if os.getpgrp() == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(0, signal.SIGKILL)
        os._exit(status)

    return watch_lifeline(fd, end)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when the thread that forked it ends (Linux).

    Call it between fork and exec, from a child of a process's main thread: the kernel watches the thread, not
    the process. A parent that died before the call is noticed by the new parent being init, hence the check.
    """
    parent = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Become the parent of descendants whose own parent dies, instead of init (Linux)."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
