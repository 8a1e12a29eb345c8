"""A clock that stands still until a test advances it, and one that nobody can set."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from opentinker_kit.clock import ManualClock, SteadyClock, SystemClock


async def test_sleepers_wake_in_the_order_of_their_times() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, *seconds: float) -> None:
        for duration in seconds:
            await clock.sleep(duration)
            woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("a", 5, 1)), asyncio.create_task(sleeper("b", 2, 2))]
    await asyncio.sleep(0)
    start = clock.now()
    await clock.advance(4.5)
    assert woken == [("b", 2), ("b", 4)]
    await clock.advance(1.5)
    assert woken[2:] == [("a", 5), ("a", 6)]
    assert clock.now() - start == timedelta(seconds=6)
    await asyncio.gather(*tasks)


async def test_the_system_clock_moves() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0.01)
    assert clock.monotonic() - before >= 0.009
    assert clock.now().tzinfo is not None


def test_a_steady_clock_does_not_follow_when_the_machine_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before = clock.now()
    monkeypatch.setattr(SystemClock, "now", lambda self: datetime(1999, 1, 1, tzinfo=UTC))
    assert timedelta() <= clock.now() - before < timedelta(minutes=1)
