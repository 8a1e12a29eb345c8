"""Room for a job that needs more than is free at once, so that small ones do not starve it.

Jobs have time limits, so it can be said when enough of what is held now will be free at the latest, and on
which servers. There, slots are kept for the large job. Others may use them meanwhile if their own limit ends
before that time. Where nobody can say when (a holder has no limit), they may if they end within the time that
the large job has waited already: its wait at most doubles. On the same servers, slots that the large job will
not need are for everyone.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentinker_scheduler.domain.floor import Demand, Floor, Hold
from opentinker_scheduler.domain.outlook import Later, Outlook


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
    """When a job fits at the latest, and how."""

    demand: Demand
    ends_s: float | None
    """From now; None: nobody knows."""
    later: Later
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
    tenures = list(tenures)
    outlook = Outlook(demand, floor, [one.job_id for one in tenures])
    order = sorted((one for one in tenures if one.job_id in outlook.jobs), key=_when)

    def after(number: int) -> Later | None:
        return outlook.without([one.job_id for one in order[:number]])

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
    ends_s = order[high - 1].ends_s if high else 0.0
    reservation = Reservation(demand, ends_s, found, waited_s if ends_s is None else ends_s)
    _keep(reservation, floor, outlook, outlook.ended([one.job_id for one in order[:high]]))
    return reservation


def _when(tenure: Tenure) -> tuple[bool, float, float, str]:
    """By end; of those without a known one, who has been there longest first."""
    known = tenure.ends_s is not None
    return (not known, tenure.ends_s or 0.0, tenure.since, tenure.job_id)


def _keep(found: Reservation, floor: Floor, outlook: Outlook, ended: frozenset[str]) -> None:
    """Mark what the reservation takes."""
    job_id, later = found.demand.job_id, found.later
    taken: Mapping[str, int] = Counter(placement.server_id for placement in later.placements)
    exclusive = {one.server_id for one in later.placements if one.need.exclusive}
    for one in outlook.useful:
        if number := taken.get(one.server_id, 0):
            spare = len(one.without(ended).free) - number
            one.hold = Hold(job_id, found.lends_s, 0 if one.server_id in exclusive else spare)
    if not later.launched:
        return
    for new in later.launched:
        floor.keep(new, Hold(job_id, found.lends_s, 0))
    engines = [new.options.engine for new in later.launched]
    missing = sum(floor.running.values()) + len(engines) - floor.limits.max_servers
    for engine, limit in floor.limits.max_engine_servers.items():
        over = floor.running.get(engine, 0) + engines.count(engine) - limit
        missing = max(missing, over)
    # Of what can make room, as much as is needed is left to run empty: whoever has the GPUs, then any.
    gpus = frozenset(device for new in later.launched for device in new.devices)
    stopped = sorted(
        later.stopped, key=lambda one: (gpus.isdisjoint(one.devices), one.options.engine not in engines)
    )
    for number, one in enumerate(stopped):
        if number < missing or not gpus.isdisjoint(one.devices):
            one.hold = Hold(job_id, found.lends_s, 0)
