"""Room for a job that needs more than is free at once, so that small ones do not starve it.

Jobs have time limits, so it can be said when enough of what is held now will be free at the latest, and on
which servers. There, slots are kept for the large job. Others may use them meanwhile if their own limit ends
before that time. Where nobody can say when (a holder has no limit), they may if they end within the time that
the large job has waited already: its wait at most doubles. On the same servers, slots that the large job will
not need are for everyone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opentinker_scheduler.domain.floor import Capacity, Demand, Floor, Hold, Placement


@dataclass(frozen=True, slots=True)
class Tenure:
    """A job that holds slots, and how long at most it goes on to."""

    job_id: str
    ends_s: float | None = None
    """From now; None: nobody knows."""
    since: float = 0.0
    """When it got them."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """When a job fits at the latest, and where."""

    demand: Demand
    ends_s: float | None
    """From now; None: nobody knows."""
    placements: tuple[Placement, ...]
    engines: tuple[str, ...]
    """Of the servers that are to be started for it then."""
    ended: frozenset[str]
    """The jobs that end before."""
    stopped: tuple[Capacity, ...]
    """Servers of other kinds that are without work then, and can make room."""
    lends_s: float
    """Others may use what is kept if they end within so many seconds."""

    def lends(self, limit_s: float | None) -> bool:
        return limit_s is not None and limit_s <= self.lends_s


def needs_room(demand: Demand, floor: Floor) -> bool:
    """Whether a job could be starved by smaller ones. One that takes any slot that a server of its kind
    frees could not: being first in order it gets that slot.
    """
    if len(demand.needs) > 1 or demand.needs[0].exclusive:
        return True
    return floor.limits.can_launch and not any(server.suits(demand.needs[0]) for server in floor.servers)


def reserve(demand: Demand, floor: Floor, tenures: Iterable[Tenure], waited_s: float) -> Reservation | None:
    """Find the earliest time and place for a job that does not fit now, and keep its slots. None where it
    would not fit even if all others ended, or where something is kept for others already.
    """
    order = sorted(tenures, key=_when)
    jobs = {one.job_id for one in order}
    free = [one for one in floor.servers if one.hold is None]
    # What nobody holds any more but is not freed yet is as good as free.
    leaving = {job for server in free for job in server.jobs if job not in jobs}
    useful = [one for one in free if any(map(one.suits, demand.needs))]
    found_useful = {one.server_id for one in useful}
    others = [one for one in free if one.launched and one.server_id not in found_useful]

    def after(number: int) -> Reservation | None:
        ended = frozenset(leaving | {one.job_id for one in order[:number]})
        ends_s = order[number - 1].ends_s if number else 0.0
        stopped = [one for one in others if one.jobs <= ended]
        running = Counter(floor.running)
        running.subtract(floor.leaving)
        running.subtract(one.options.engine for one in stopped)
        then = [one.without(ended) for one in useful if one.free or not one.jobs.isdisjoint(ended)]
        later = Floor(then, floor.limits, running, lambda: "later")
        placed = later.place(demand)
        if not isinstance(placed, tuple):
            return None
        engines = tuple(new.options.engine for new in later.launched)
        lends_s = waited_s if ends_s is None else ends_s
        return Reservation(demand, ends_s, placed, engines, ended, tuple(stopped), lends_s)

    low, high, found = -1, 0, after(0)
    while found is None:
        if high == len(order):
            return None
        low, high = high, min(max(1, 2 * high), len(order))
        found = after(high)
    while high - low > 1:
        middle = (low + high) // 2
        earlier = after(middle)
        if earlier is None:
            low = middle
        else:
            high, found = middle, earlier
    _keep(found, floor, useful)
    return found


def _when(tenure: Tenure) -> tuple[bool, float, float, str]:
    """By end; of those without a known one, who has been there longest first."""
    known = tenure.ends_s is not None
    return (not known, tenure.ends_s or 0.0, tenure.since, tenure.job_id)


def _keep(found: Reservation, floor: Floor, servers: Sequence[Capacity]) -> None:
    """Mark what the reservation takes."""
    job_id, lends_s = found.demand.job_id, found.lends_s
    taken: Mapping[str, int] = Counter(placement.server_id for placement in found.placements)
    exclusive = {one.server_id for one in found.placements if one.need.exclusive}
    for one in servers:
        if number := taken.get(one.server_id, 0):
            spare = len(one.without(found.ended).free) - number
            one.hold = Hold(job_id, lends_s, 0 if one.server_id in exclusive else spare)
    if not found.engines:
        return
    for engine in found.engines:
        floor.keep(engine, Hold(job_id, lends_s, 0))
    missing = sum(floor.running.values()) + len(found.engines) - floor.limits.max_servers
    for engine, limit in floor.limits.max_engine_servers.items():
        over = floor.running.get(engine, 0) + found.engines.count(engine) - limit
        missing = max(missing, over)
    # Of what can make room, as much as is needed is left to run empty.
    stopped = sorted(found.stopped, key=lambda one: one.options.engine not in found.engines)
    for one in stopped[: max(0, missing)]:
        one.hold = Hold(job_id, lends_s, 0)
