"""How long engines worked, as the services report it: what `timing_s/engine_*` and the overhead benchmark
are made of.

Requests overlap, so their engine times do not add up. A request's work is taken to end when its answer
arrives; the length of the union of all such intervals is the wall time in which the engine had work of
ours.
"""

import time


class EngineMeter:
    """Collects intervals of engine work since it was last read."""

    def __init__(self) -> None:
        self._intervals: list[tuple[float, float]] = []

    def add(self, seconds: float) -> None:
        """Note work of that length that has just ended."""
        now = time.monotonic()
        if seconds > 0:
            self._intervals.append((now - seconds, now))

    def take(self) -> float:
        """Seconds covered by the intervals, which are forgotten."""
        intervals, self._intervals = sorted(self._intervals), []
        return covered(intervals)


def covered(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in intervals:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
