"""One jail as its maker sees it: bytes go in and out, with a deadline and a bound on each, until it is gone.

Nothing that comes out is believed: it is counted, cut and matched against what it may look like. Once `pump`
says that the jail is gone, or `kill` has returned, no process of it is left: bubblewrap ends after the jail's
process 1, which ends after all the others.
"""

import marshal
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opentinker.sandbox import command, seccomp
from opentinker.sandbox.errors import unavailable
from opentinker.sandbox.limits import Ended, Limits
from opentinker.sandbox.slots import Slot
from opentinker.sandbox.spawning import spawn

FRAME_BYTES = 4 << 20
"""Longest message from inside."""
START_S = 30.0
"""How long a jail may take before the code in it starts, on a machine that is busy with others."""
_GONE_S = 10.0
_INHERITED = ("control", "report", "info", "filter")
_READY = b"READY\n"
_REPORT = re.compile(
    rb"(EXITED|SIGNALLED|CPU_LIMIT|MEMORY_LIMIT|PROCESS_LIMIT|FILE_LIMIT|LOST) (\d{1,3}) (\d{1,18})\n"
)
_CHILD = re.compile(rb'"child-pid"\s*:\s*(\d{1,10})')

OnFrame = Callable[[bytes], bool]
"""Takes a message from inside; True ends the waiting."""


class JailProcess:
    """A running jail. For one thread at a time, but for `interrupt`."""

    def __init__(self, python: Path, packages: tuple[Path, ...], limits: Limits) -> None:
        """Start it. MissingDependency if this machine cannot."""
        here = command.host()
        self.limits = limits
        self.stdout, self.stderr = bytearray(), bytearray()
        self.ended: Ended | None = None
        self.exit: int | None = None
        self.cpu_s = 0.0
        self.peak_bytes = 0
        self._slot = Slot() if here.mode is command.Mode.SLOT_UID else None
        self._ending = threading.Lock()
        self._interrupted = False
        self._report, self._info, self._frames = bytearray(), bytearray(), bytearray()
        self._to_control = memoryview(command.keeper_code(python))
        self._to_stdin = memoryview(b"")
        self._ours: dict[str, int] = {}
        theirs: dict[str, int] = {}
        try:
            for name in ("stdout", "stderr", "report", "info"):
                self._ours[name], theirs[name] = os.pipe()
            theirs["stdin"], self._ours["stdin"] = os.pipe()
            theirs["filter"] = seccomp.readable()
            mine, other = socket.socketpair()
            self._ours["control"], theirs["control"] = mine.detach(), other.detach()
            for fd in self._ours.values():
                os.set_blocking(fd, False)
            words = command.command(
                uid=self._slot.uid if self._slot else None,
                python=python,
                packages=packages,
                limits=limits,
                info=theirs["info"],
                filter_fd=theirs["filter"],
                control=theirs["control"],
                report=theirs["report"],
            )
            streams = (theirs["stdin"], theirs["stdout"], theirs["stderr"])
            self._process = spawn(words, streams, [theirs[name] for name in _INHERITED])
            self._gone = os.pidfd_open(self._process.pid)
        except BaseException:
            for fd in self._ours.values():
                os.close(fd)
            if self._slot:
                self._slot.free()
            raise
        finally:
            for fd in theirs.values():
                os.close(fd)

    @property
    def alive(self) -> bool:
        """Its processes may still run."""
        return self.ended is None

    @property
    def pid(self) -> int:
        """Of bubblewrap, for tests and logs."""
        return self._process.pid

    def send(self, request: Mapping[str, Any]) -> None:
        """Have a request sent; `pump` does it."""
        # Version 2 is read by every Python. It goes in only: what comes out is never unmarshalled.
        body = marshal.dumps(dict(request), 2)
        self._to_control = memoryview(bytes(self._to_control) + len(body).to_bytes(4, "big") + body)

    def feed(self, data: bytes) -> None:
        """Have standard input written, and closed after it."""
        self._to_stdin = memoryview(data)
        if not data:
            self._close("stdin")

    def pump(self, seconds: float, on_frame: OnFrame | None = None) -> bool:
        """Move bytes until the jail is gone (True) or `on_frame` is satisfied (False).

        After `seconds` it is killed as TIMEOUT. They count from when the code can start.
        """
        deadline = time.monotonic() + (seconds if self._started else START_S)
        started = self._started
        while self.ended is None:
            if not started and self._started:
                started = True
                deadline = time.monotonic() + seconds
            left = deadline - time.monotonic()
            if left <= 0:
                self._end(Ended.TIMEOUT if started else Ended.LOST)
                break
            if self._gone in self._move(left):
                self._end(None)
                break
            if self._interrupted:
                self._end(Ended.LOST)
                break
            if self._output_size > self.limits.output_bytes:
                self._end(Ended.OUTPUT_LIMIT)
                break
            while (frame := self._next_frame()) is not None:
                if on_frame is not None and on_frame(frame):
                    # What it printed before it said so is in the pipes by now.
                    self._read("stdout")
                    self._read("stderr")
                    if self._output_size > self.limits.output_bytes:
                        self._end(Ended.OUTPUT_LIMIT)
                    return not self.alive
        return True

    def interrupt(self) -> None:
        """Have it end soon, whoever waits for it; from any thread."""
        self._interrupted = True
        with self._ending:
            if self.ended is None and _CHILD.search(bytes(self._info)):
                self._kill_first_process()

    def kill(self, as_: Ended = Ended.LOST) -> None:
        """End it now, and wait until nothing of it is left."""
        if self.ended is None:
            self._end(as_)

    @property
    def _started(self) -> bool:
        return self._report.startswith(_READY)

    @property
    def _output_size(self) -> int:
        return len(self.stdout) + len(self.stderr)

    def _move(self, seconds: float) -> set[int]:
        """Wait for anything to happen and move what can be moved; the descriptors that were ready."""
        poll = select.poll()
        poll.register(self._gone, select.POLLIN)
        names = {fd: name for name, fd in self._ours.items()}
        for name, fd in self._ours.items():
            wanted = 0 if name == "stdin" else select.POLLIN
            if (name == "stdin" and self._to_stdin) or (name == "control" and self._to_control):
                wanted |= select.POLLOUT
            if wanted:
                poll.register(fd, wanted)
        ready = poll.poll(min(seconds, 3600.0) * 1000 + 1)
        for fd, what in ready:
            if fd == self._gone:
                continue
            name = names[fd]
            if name == "stdin":
                self._to_stdin = self._write(name, self._to_stdin)
                if not self._to_stdin:
                    self._close("stdin")
                continue
            if name == "control" and what & select.POLLOUT:
                self._to_control = self._write(name, self._to_control)
            if what & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read(name)
        return {fd for fd, _ in ready}

    def _write(self, name: str, data: memoryview) -> memoryview:
        try:
            return data[os.write(self._ours[name], data[: 1 << 16]) :]
        except BlockingIOError:
            return data
        except OSError:
            # It does not want it any more.
            return memoryview(b"")

    def _read(self, name: str) -> None:
        """Take what there is, within bounds; what is closed is forgotten."""
        if name not in self._ours:
            return
        into = {
            "stdout": self.stdout,
            "stderr": self.stderr,
            "report": self._report,
            "info": self._info,
            "control": self._frames,
        }[name]
        while len(into) <= self._room(name):
            try:
                part = os.read(self._ours[name], 1 << 16)
            except BlockingIOError:
                return
            except OSError:
                part = b""
            if not part:
                self._close(name)
                return
            into += part
        if name in ("report", "info", "control"):
            # More than was agreed: nobody listens any longer.
            self._close(name)

    def _room(self, name: str) -> int:
        if name in ("stdout", "stderr"):
            return self.limits.output_bytes
        return FRAME_BYTES + 4 if name == "control" else 1 << 12

    def _next_frame(self) -> bytes | None:
        if len(self._frames) < 4:
            return None
        size = int.from_bytes(self._frames[:4], "big")
        if size > FRAME_BYTES:
            self._close("control")
            self._frames.clear()
            return None
        if len(self._frames) < 4 + size:
            return None
        frame = bytes(self._frames[4 : 4 + size])
        del self._frames[: 4 + size]
        return frame

    def _end(self, why: Ended | None) -> None:
        """Kill what is left, wait for it, and read the last words. `why` is None where it ended by itself."""
        if why is not None:
            self._learn_first_process()
            self._kill_first_process()
        status, usage = self._reap()
        self.cpu_s = usage
        for name in ("stdout", "stderr", "report"):
            self._read(name)
        with self._ending:
            self._settle(why)
        for name in list(self._ours):
            self._close(name)
        if self._slot:
            self._slot.free()
        if why is None and not self._started:
            # No line of the code ran yet: these are bubblewrap's words or those of the programs before it.
            text = self.stderr.decode(errors="replace").strip()[-500:] or f"it ended with status {status}"
            raise unavailable(f"bubblewrap cannot make a jail on this machine: {text}")

    def _settle(self, why: Ended | None) -> None:
        """Note how it ended."""
        os.close(self._gone)
        said = _REPORT.fullmatch(bytes(self._report).removeprefix(_READY)) if why is None else None
        if why is not None:
            self.ended = why
        elif self._output_size > self.limits.output_bytes:
            self.ended = Ended.OUTPUT_LIMIT
        elif said is None:
            self.ended = Ended.LOST
        else:
            self.ended, self.peak_bytes = Ended(said[1].decode()), int(said[3])
            if self.ended in (Ended.EXITED, Ended.SIGNALLED):
                self.exit = int(said[2]) + (128 if self.ended is Ended.SIGNALLED else 0)

    def _learn_first_process(self) -> None:
        """Wait until bubblewrap has said which it is: killed before, it would not collect its child."""
        deadline = time.monotonic() + _GONE_S
        while _CHILD.search(bytes(self._info)) is None and "info" in self._ours:
            left = deadline - time.monotonic()
            ready = _readable(max(0.0, left), self._gone, self._ours["info"])
            if not ready or self._gone in ready:
                return
            self._read("info")

    def _kill_first_process(self) -> None:
        found = _CHILD.search(bytes(self._info))
        if found is None:
            # It has not got that far: with bubblewrap, what it began dies too (--die-with-parent).
            self._process.kill()
            return
        try:
            first = os.pidfd_open(int(found[1]))
        except OSError:
            return
        try:
            # While bubblewrap lives it has not collected its child, so that the number is still the child's.
            if not _readable(0, self._gone):
                signal.pidfd_send_signal(first, signal.SIGKILL)
        except OSError:
            return
        finally:
            os.close(first)

    def _reap(self) -> tuple[int, float]:
        if not _readable(_GONE_S, self._gone):
            self._process.kill()
        try:
            _, status, usage = os.wait4(self._process.pid, 0)
        except ChildProcessError:
            # Somebody in this process collects every child; it is gone all the same.
            self._process.returncode = -1
            return -1, 0.0
        self._process.returncode = os.waitstatus_to_exitcode(status)
        return self._process.returncode, usage.ru_utime + usage.ru_stime

    def _close(self, name: str) -> None:
        fd = self._ours.pop(name, None)
        if fd is not None:
            os.close(fd)


def _readable(seconds: float, *fds: int) -> set[int]:
    """Which of them are, waiting so long for one. (`select` takes no numbers over 1023.)"""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(seconds * 1000)}
