"""Who gives way to a waiting job of higher priority: as few as will do, the least urgent and youngest first.

Whoever gives way is checkpointed by its trainer as its slots are taken back, and goes back to its place in
the queue. Equals never displace each other, however small their share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opentinker_scheduler.domain.floor import Demand, Floor
from opentinker_scheduler.domain.outlook import Outlook


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that runs, and has for long enough to be asked to give way."""

    job_id: str
    priority: int
    since: float
    """When it got its slots."""


def displace(
    demand: Demand, floor: Floor, going_on: Sequence[str], candidates: Iterable[Candidate]
) -> list[str] | None:
    """Whose end makes a job fit that does not fit now; nobody's where enough is being freed already, and None
    where no end of these would help."""
    outlook = Outlook(demand, floor, going_on)
    if outlook.without(()) is not None:
        return []
    order = sorted(
        (one for one in candidates if one.priority < demand.priority and one.job_id in outlook.jobs),
        key=lambda one: (one.priority, -one.since, one.job_id),
    )
    names = [one.job_id for one in order]
    if outlook.without(names) is None:
        return None
    low, high = 0, len(names)
    while high - low > 1:
        middle = (low + high) // 2
        if outlook.without(names[:middle]) is None:
            low = middle
        else:
            high = middle
    chosen = names[:high]
    # The last one is needed; of those before it, some may hold what is of no use here.
    for name in chosen[-2::-1]:
        fewer = [other for other in chosen if other != name]
        if outlook.without(fewer) is not None:
            chosen = fewer
    return chosen
