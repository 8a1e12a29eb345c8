"""Figures of a queue: how fair a division is, what a strict queue would have made of the same jobs."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """A job of a trace: how many slots it takes, from when it waits, and for how long it runs."""

    slots: int
    seconds: float
    submit: float = 0.0


def jain(amounts: Iterable[float]) -> float:
    """Jain's index of what each got: 1 where all got the same, 1/n where one got everything."""
    values = list(amounts)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that is at least as large as this part of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(part * 1000) * len(ordered) // 1000) - 1))]


def strict_fifo(trace: Sequence[Work], slots: int) -> list[float]:
    """When each job of a trace starts if nobody ever passes another, with no time lost between two jobs."""
    free, now = slots, 0.0
    ends: list[tuple[float, int]] = []
    starts: list[float] = []
    for work in trace:
        now = max(now, work.submit)
        while ends and (ends[0][0] <= now or free < work.slots):
            end, given = heapq.heappop(ends)
            now, free = max(now, end), free + given
        free -= work.slots
        starts.append(now)
        heapq.heappush(ends, (now + work.seconds, work.slots))
    return starts


def makespan(trace: Sequence[Work], starts: Sequence[float]) -> float:
    """When the last job of a trace ends."""
    return max(start + work.seconds for work, start in zip(trace, starts, strict=True))
