"""Where the lines of a log come from: servers' logs, read piece by piece, and the history of a job."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from opentinker_scheduler.domain.logs import Written, is_about, may_be_about, read_line
from opentinker_scheduler.domain.model import Role, Server
from opentinker_scheduler.domain.records import JobEvent
from opentinker_scheduler.launcher_ports import Launcher

_BLOCK = 2**16
"""So much of a log is read at once; a line that is longer is cut."""
_TAIL_BYTES = 2**22
"""Last lines are looked for in so much of a log."""
_SAID = -1
"""Position in a log that is not kept here, once that was said."""


@dataclass(frozen=True, slots=True)
class _Placed:
    """A line, and from where to where it goes with its end."""

    start: int
    end: int
    line: Written


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line, for who asked."""

    text: str
    time: datetime | None
    server: str = ""
    """`servers/{server}`; empty for what the scheduler says."""
    role: Role | None = None


class Source(Protocol):
    """Gives lines in the order that they were written."""

    @property
    def position(self) -> int:
        """Behind the line that was taken last."""
        ...

    @property
    def ready(self) -> int:
        """How many lines were found and not taken."""
        ...

    async def next_time(self) -> datetime | None:
        """When the next line was written, as far as is known; None if there is none now."""
        ...

    def take(self) -> LogLine:
        """The next line, which `next_time` found."""
        ...


class History:
    """What became of a job."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.seen = position
        """The number of the last event that was added."""
        self._waiting: deque[JobEvent] = deque()

    def add(self, events: Sequence[JobEvent]) -> None:
        self._waiting.extend(events)
        if events:
            self.seen = events[-1].seq

    @property
    def ready(self) -> int:
        return len(self._waiting)

    async def next_time(self) -> datetime | None:
        return self._waiting[0].time if self._waiting else None

    def take(self) -> LogLine:
        event = self._waiting.popleft()
        self.position = event.seq
        attempt = f" (attempt {event.attempt})" if event.attempt else ""
        reason = "" if event.reason in ("", event.state.value) else f": {event.reason}"
        return LogLine(f"{event.state.upper()}{attempt}{reason}", event.time)


class ServerLog:
    """What a server wrote: about one job, or all of it.

    Only whole lines are given; what an ended server wrote last needs no end. Who begins within a line gets
    nothing of it: the middle of another job's line could look like a line of one's own.
    """

    def __init__(self, launcher: Launcher, server: Server, job: str, position: int, tail: int | None) -> None:
        self.position = position
        self.ended = False
        """Nothing more is written to it."""
        self._launcher = launcher
        self._server = server
        self._job = job
        self._tail = tail
        self._waiting: deque[_Placed] = deque()
        self._at = position
        """What is before was read."""
        self._aligned = position == 0
        """A line begins at `_at`."""
        self._over = position == _SAID
        self._time = server.start_time
        """Of the last line that said when it was written."""

    @property
    def ready(self) -> int:
        return len(self._waiting)

    async def next_time(self) -> datetime | None:
        if self._tail is not None:
            tail, self._tail = self._tail, None
            await self._begin_with_last(tail)
        while not self._waiting and await self._read_on():
            pass
        # Lines about others are not read again.
        self.position = self._waiting[0].start if self._waiting else self._at
        return (self._waiting[0].line.time or self._time) if self._waiting else None

    def take(self) -> LogLine:
        placed = self._waiting.popleft()
        self.position = placed.end
        line = placed.line
        self._time = line.time or self._time
        return LogLine(line.text.decode(errors="replace"), line.time, self._server.name, self._server.role)

    async def _read_on(self) -> bool:
        """Read the next piece; whether there was one."""
        if self._over:
            return False
        if not self._aligned and self._at > 0:
            await self._look_back()
        part = await self._launcher.read_log(self._server.id, self._at, _BLOCK)
        if part is None:
            return self._none_is_kept()
        if not part.data:
            self._over = self.ended
            return False
        used = part.data.rfind(b"\n") + 1
        if not used:
            last = self.ended and self._at + len(part.data) >= part.size
            if len(part.data) < _BLOCK and not last:
                return False
            used = len(part.data)
        self._keep(part.data[:used])
        self._at += used
        return True

    async def _look_back(self) -> None:
        """Find out whether a line begins here."""
        before = await self._launcher.read_log(self._server.id, self._at - 1, 1)
        self._aligned = before is not None and before.data == b"\n"

    def _keep(self, data: bytes) -> None:
        """Take those lines that are wanted from what is at `_at`."""
        start = 0 if self._aligned else data.find(b"\n") + 1 or len(data)
        self._aligned = data.endswith(b"\n")
        if not may_be_about(data, self._job):
            return
        while start < len(data):
            end = data.find(b"\n", start) + 1 or len(data)
            line = read_line(data[start:end].rstrip(b"\r\n"))
            if is_about(line, self._job):
                self._waiting.append(_Placed(self._at + start, self._at + end, line))
            start = end

    def _none_is_kept(self) -> bool:
        """Say once that there is no log, where there will be none."""
        if self._server.launched and not self.ended:
            return False
        text = "its log is not kept any more"
        if not self._server.launched:
            text = "it was not started by this cluster: its log is where its operator keeps it"
        self._waiting.append(_Placed(self._at, _SAID, Written(text.encode(), None, "")))
        self._at, self._over = _SAID, True
        return True

    async def _begin_with_last(self, number: int) -> None:
        """Read to the end, and keep the last lines only."""
        part = await self._launcher.read_log(self._server.id, 0, 0)
        if part is None:
            return
        back = _BLOCK if number else 0
        while True:
            begin = self._at = max(0, part.size - back)
            self._aligned = begin == 0
            self._waiting.clear()
            while self._at < part.size and await self._read_on():
                pass
            if len(self._waiting) >= number or begin == 0 or back >= _TAIL_BYTES:
                break
            back *= 4
        while len(self._waiting) > number:
            self._waiting.popleft()
