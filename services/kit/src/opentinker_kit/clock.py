"""Time as a port: leases, deadlines and retries ask a Clock, so that tests need not wait."""

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """What time it is, and waiting."""

    def monotonic(self) -> float:
        """Seconds that only grow; for durations, deadlines and leases."""
        ...

    def now(self) -> datetime:
        """Wall-clock time in UTC; for records, never for durations."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SteadyClock(SystemClock):
    """The machine's clock as it was when this was made, going on without steps.

    Someone who sets the clock then ends no lease, skips no limit and changes no order. Times of records are
    off by as much until the process starts again.
    """

    def __init__(self) -> None:
        self._start, self._start_s = super().now(), self.monotonic()

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self.monotonic() - self._start_s)


class ManualClock:
    """A clock that stands still until a test advances it."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed_s = 0.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def monotonic(self) -> float:
        return self._elapsed_s

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s)

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.Event()
        self._sleepers.append((self._elapsed_s + seconds, woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Move time forward and let everything that was due run."""
        end = self._elapsed_s + seconds
        while due := sorted(
            ((at, woken) for at, woken in self._sleepers if at <= end), key=lambda item: item[0]
        ):
            at, woken = due[0]
            self._sleepers.remove((at, woken))
            self._elapsed_s = max(self._elapsed_s, at)
            woken.set()
            await _settle()
        self._elapsed_s = end
        await _settle()


async def _settle() -> None:
    """Give tasks that just woke a chance to run and to sleep again."""
    for _ in range(10):
        await asyncio.sleep(0)
