"""When jobs that wait will start, as far as that can be said.

What is assumed, and not always true: slots are given in the order of the queue as it stands now, so nobody
comes in between and nobody is let past; a job holds its slots for as long as the middle one of those of its
kind that ended lately, of those that held theirs for as long as it has by now, and no longer than its
`max_duration`; a slot is as good as another of an equal server; no server has to be started first. Where
neither a limit nor the past says when enough slots of the right servers will be free, nothing is said of a
job.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import heapify, heappop, heappush

from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.model import JobKind, Role

_MIN_ENDED = 5
"""With fewer jobs of a kind that ended, nothing is said of that kind."""
_STEADY_S, _STEADY_PART = 10.0, 0.1
"""A new estimate that differs by less, or by a smaller part of the wait, is not worth telling."""


class Durations:
    """How long jobs held slots, by kind."""

    def __init__(self, ended: Iterable[tuple[JobKind, float]] = ()) -> None:
        self._held: dict[JobKind, list[float]] = {}
        for kind, held_s in ended:
            self._held.setdefault(kind, []).append(held_s)
        for held in self._held.values():
            held.sort()

    def rest_s(self, kind: JobKind, held_s: float = 0.0) -> float | None:
        """How long the middle one went on, of those that held slots for longer than `held_s`. None where too
        few ended, or none of them took so long."""
        held = self._held.get(kind, [])
        longer = bisect_right(held, held_s)
        if len(held) < _MIN_ENDED or longer == len(held):
            return None
        return held[(longer + len(held)) // 2] - held_s


def soonest(*times_s: float | None) -> float | None:
    """The least of what is known."""
    return min((time_s for time_s in times_s if time_s is not None), default=None)


class _Group:
    """Servers that are equal: when their slots get free, in seconds from now, as far as that is known."""

    def __init__(self, first: Capacity) -> None:
        self.first = first
        self.size = 1
        self.free: list[float] = []

    def add(self, server: Capacity, ends_s: Mapping[str, float | None]) -> None:
        # Who is not named has ended, and its slots are only being freed.
        times = {slot: ends_s.get(job, 0.0) for slot, job in server.taken.items()}
        times.update(dict.fromkeys(server.free, 0.0))
        if server.exclusive:
            known = [time_s for time_s in times.values() if time_s is not None]
            times = dict.fromkeys(times, max(known, default=0.0)) if len(known) == len(times) else {}
        self.size = max(self.size, len(server.taken) + len(server.free))
        self.free += [time_s for time_s in times.values() if time_s is not None]


def starts(
    queue: Iterable[Demand],
    servers: Sequence[Capacity],
    ends_s: Mapping[str, float | None],
    lasts_s: Callable[[Demand], float | None],
) -> dict[str, float]:
    """In how many seconds jobs start that wait, the first of the queue first; those left out of which nothing
    is known, or that the estimate cannot tell from those that fit now.

    `ends_s`: in how many seconds those who hold slots give them up, None where nobody knows. `lasts_s`: how
    long one of the queue will hold what it gets.
    """
    groups: dict[object, _Group] = {}
    for server in servers:
        key = (server.role, server.base_model, server.options, server.launched)
        groups.setdefault(key, _Group(server)).add(server, ends_s)
    for group in groups.values():
        heapify(group.free)
    found: dict[str, float] = {}
    for demand in queue:
        taken = _take(demand, groups.values())
        if taken is None:
            continue
        start_s = max(time_s for _, time_s in taken)
        if start_s > 0:
            found[demand.job_id] = start_s
        if (lasts := lasts_s(demand)) is not None:
            for group, _ in taken:
                heappush(group.free, start_s + lasts)
    return found


def _take(demand: Demand, groups: Iterable[_Group]) -> list[tuple[_Group, float]] | None:
    """The slots that a job gets, each with when it is free; None, and nothing taken, if there are too few."""
    taken: list[tuple[_Group, float]] = []
    for need, number in Counter(_alike(need) for need in demand.needs).items():
        suiting = [group for group in groups if group.first.suits(need)]
        for _ in range(_slots(need, number, suiting)):
            first = min((group for group in suiting if group.free), key=_next, default=None)
            if first is None:
                for group, time_s in taken:
                    heappush(group.free, time_s)
                return None
            taken.append((first, heappop(first.free)))
    return taken or None


def _alike(need: Need) -> Need:
    """The need without its place in the job."""
    return Need(0, 0, need.role, need.base_model, need.options, need.exclusive)


def _slots(need: Need, number: int, suiting: Sequence[_Group]) -> int:
    """How many slots such needs take: an exclusive one takes its server's."""
    size = max((group.size for group in suiting), default=1)
    if not need.exclusive:
        return number
    # Replicas never share a server; the trainer slots of one job do.
    return size * (number if need.role is Role.INFERENCE else -(-number // size))


def _next(group: _Group) -> float:
    return group.free[0]


def steady(before: datetime | None, start: datetime, now: datetime) -> datetime:
    """What to tell where `before` was told: the same, unless it is not true any more."""
    if before is not None and before > now:
        slack = max(timedelta(seconds=_STEADY_S), _STEADY_PART * (start - now))
        if abs(start - before) <= slack:
            return before
    return start
