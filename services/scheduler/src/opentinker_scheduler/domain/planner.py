"""Which waiting job gets which slots: one pure decision over a snapshot, made by each tick.

Jobs that lost slots go first, then the queue in fair order (`shares`); at most `max_grants` demands are
placed. One that does not fit is passed over, so that a large job does not block a small one; once it has
waited for a while, slots are kept for it (`reservations`), so that small ones do not block it either. What
holds for each placement stands in `floor`.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opentinker_scheduler.domain.floor import Capacity, Demand, Floor, NewServer, Placement, Shortage
from opentinker_scheduler.domain.limits import Key, Limits
from opentinker_scheduler.domain.model import Role
from opentinker_scheduler.domain.nodes import Pool
from opentinker_scheduler.domain.preemption import Candidate, displace
from opentinker_scheduler.domain.reservations import Reservation, Tenure, needs_room, reserve
from opentinker_scheduler.domain.room import make_room, warm_up
from opentinker_scheduler.domain.shares import EVEN, NOTHING, FairOrder, Shares, over_quota, positions

_MAX_RESERVATIONS = 2
"""For so many jobs slots are kept at a time."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Everything a job lacked."""

    job_id: str
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a plan starts from, besides the servers and who waits."""

    limits: Limits
    running: Mapping[str, int] = field(default_factory=dict)
    """Servers that exist, by engine."""
    leaving: Mapping[str, int] = field(default_factory=dict)
    """Those of them that are being stopped."""
    shares: Shares = EVEN
    tenures: Callable[[], Iterable[Tenure]] = tuple
    """Of the jobs that hold slots; asked for only where slots must be kept."""
    candidates: Callable[[], Iterable[Candidate]] | None = None
    """Jobs that may have to give way to others of higher priority; None: nobody has to."""
    yielding: bool = False
    """Some gave way, and their slots are being freed."""
    now: float = 0.0
    """On the clock of `Demand.since`."""
    devices: Collection[str] = ()
    """GPUs of servers that exist."""
    coming: Collection[str] = ()
    """Those of servers that are being stopped."""
    lacking: Sequence[Key] = ()
    """Servers to be kept ready that are not there."""


@dataclass(slots=True)
class Plan:
    """What to do now, and what to tell those who wait."""

    grants: list[Grant] = field(default_factory=list)
    launches: list[NewServer] = field(default_factory=list)
    evictions: list[str] = field(default_factory=list)
    """Idle servers to stop, so that others can start."""
    preempted: list[str] = field(default_factory=list)
    """Jobs that give way to those for which slots are kept."""
    reservations: list[Reservation] = field(default_factory=list)
    shares: Shares = EVEN
    """After the grants."""
    unplaced: dict[str, str] = field(default_factory=dict)
    """Why those that lost slots wait, by job."""
    queue: list[Demand] = field(default_factory=list)
    """Who waits in the queue."""
    reason_of: Callable[[Demand], str] = str
    """Why one of those waits."""

    def waiting(self) -> Iterator[tuple[str, int, str]]:
        """What to tell whom: job, position in the queue (0 for jobs that only lost slots) and reason."""
        for job_id, reason in self.unplaced.items():
            yield job_id, 0, reason
        found = positions(self.queue, self.shares)
        for demand in self.queue:
            position = found[demand.job_id]
            ahead, reason = position - 1, self.reason_of(demand)
            yield demand.job_id, position, f"{reason}; {_jobs(ahead)} ahead" if ahead else reason


def make_plan(
    demands: Iterable[Demand],
    servers: Iterable[Capacity],
    cluster: Cluster,
    new_server_id: Callable[[], str],
) -> Plan:
    """Place what fits. The servers are changed: they belong to the plan."""
    floor = Floor(
        servers,
        cluster.limits,
        cluster.running,
        new_server_id,
        cluster.leaving,
        Pool(cluster.limits.nodes, cluster.devices),
        cluster.coming,
    )
    planning = _Planning(floor, cluster)
    queue: list[Demand] = []
    for demand in demands:
        if demand.queued:
            queue.append(demand)
        else:
            planning.restore(demand)
    planning.walk(queue)
    planning.warm_up()
    plan = planning.plan
    plan.launches, plan.evictions = floor.launched, floor.evicted
    return plan


class _Planning:
    """One plan in the making."""

    def __init__(self, floor: Floor, cluster: Cluster) -> None:
        self.plan = Plan()
        self._floor = floor
        self._limits = cluster.limits
        self._cluster = cluster
        self._started: list[Tenure] = []
        self._failed: dict[tuple[Hashable, ...], str] = {}
        self._shortages: list[Shortage] = []

    def restore(self, demand: Demand) -> None:
        """Give a job back what it lost."""
        placed = self._place(demand) if self._may_grant() else None
        if isinstance(placed, tuple):
            self.plan.grants.append(Grant(demand.job_id, placed))
        else:
            # Of a job with two demands the first says what matters more.
            self.plan.unplaced.setdefault(demand.job_id, _reason(placed))

    def walk(self, queue: Sequence[Demand]) -> None:
        """Go through the queue, fairest first, until nobody else can get anything."""
        order = FairOrder(queue, self._cluster.shares)
        waiting: list[Demand] = []
        untried, kept = self._untried(queue), 0
        for demand in order:
            if not self._may_grant() or not untried:
                waiting.append(demand)
                break
            if not self._give(demand, order):
                waiting.append(demand)
            if kept < len(self.plan.reservations):
                kept = len(self.plan.reservations)
                untried = self._untried(queue)
            untried -= self._failed.keys()
        self.plan.queue = waiting + order.rest()
        self.plan.shares = order.now()
        self.plan.reason_of = self._reason_of

    def warm_up(self) -> None:
        """Start servers that are to be kept ready, if all who wait were looked at."""
        if self._may_grant():
            warm_up(self._floor, self._cluster.lacking, self._shortages)

    def _reason_of(self, demand: Demand) -> str:
        shares = self.plan.shares
        held = shares.held.get(demand.project, NOTHING)
        if quota := over_quota(demand.project, demand.cost, shares, held):
            return f"waiting for its quota: {quota}"
        reason = self._known(demand) or _reason(None)
        for one in self.plan.reservations:
            if one.demand.job_id == demand.job_id:
                reason += "; slots are kept for it"
                if one.ends_s is not None:
                    # In whole minutes, so that it does not say something new at every tick.
                    reason += f", enough within {max(1, math.ceil(one.ends_s / 60))} min"
        return reason

    def _may_grant(self) -> bool:
        return len(self.plan.grants) < self._limits.max_grants

    def _give(self, demand: Demand, order: FairOrder[Demand]) -> bool:
        """Start a job, if its project may and it fits."""
        if over_quota(demand.project, demand.cost, self._cluster.shares, order.held(demand.project)):
            return False
        if self._known(demand):
            return False
        placed = self._place(demand)
        if isinstance(placed, tuple):
            self.plan.grants.append(Grant(demand.job_id, placed))
            order.grant(demand.project, demand.cost)
            self._started.append(Tenure(demand.job_id, demand.limit_s, self._cluster.now))
            return True
        # What is free only gets less: whoever is like this one need not be tried.
        self._failed[self._likeness(demand)] = _reason(placed)
        self._reserve(demand)
        return False

    def _likeness(self, demand: Demand) -> tuple[Hashable, ...]:
        """Equal for queued demands that fit or fail alike, now that slots are kept for some."""
        shape = demand.needs if demand.shape is None else demand.shape
        return (shape, *(one.lends(demand.limit_s) for one in self.plan.reservations))

    def _known(self, demand: Demand) -> str:
        """Why a demand fails, if one like it did. What failed before slots were kept fails after that too."""
        return self._why(self._likeness(demand))

    def _why(self, likeness: tuple[Hashable, ...]) -> str:
        for length in range(1, len(likeness) + 1):
            if reason := self._failed.get(likeness[:length]):
                return reason
        return ""

    def _untried(self, queue: Iterable[Demand]) -> set[tuple[Hashable, ...]]:
        alike = set(map(self._likeness, queue))
        return {likeness for likeness in alike if not self._why(likeness)}

    def _place(self, demand: Demand) -> tuple[Placement, ...] | Shortage:
        placed = self._floor.place(demand)
        if isinstance(placed, Shortage):
            self._shortages.append(placed)
            make_room(self._floor, demand, placed)
        return placed

    def _reserve(self, demand: Demand) -> None:
        """Keep slots for a job that has waited long, or for which others give way."""
        if len(self.plan.reservations) >= _MAX_RESERVATIONS:
            return
        waited_s = self._cluster.now - demand.since
        long = waited_s >= self._limits.reserve_after_s and needs_room(demand, self._floor)
        # Without that, whoever is small enough would take what they leave.
        if not self._preempt(demand) and not long:
            return
        found = reserve(demand, self._floor, self._tenures(), waited_s)
        if found is not None:
            self.plan.reservations.append(found)

    def _preempt(self, demand: Demand) -> bool:
        """Have others give way, where that helps; whether somebody does, now or since earlier."""
        if self._cluster.candidates is None:
            return False
        candidates = [one for one in self._cluster.candidates() if one.job_id not in self.plan.preempted]
        if not self._cluster.yielding and not any(one.priority < demand.priority for one in candidates):
            return False
        going_on = [one.job_id for one in self._tenures()]
        victims = displace(demand, self._floor, going_on, candidates)
        self.plan.preempted += victims or ()
        return victims is not None

    def _tenures(self) -> list[Tenure]:
        """Of those who go on."""
        tenures = [*self._cluster.tenures(), *self._started]
        return [one for one in tenures if one.job_id not in self.plan.preempted]


def _reason(shortage: Shortage | None) -> str:
    """What a waiting job waits for, in words a person can act on."""
    if shortage is None:
        return "waiting to be placed: the scheduler places at most its limit of jobs a tick"
    need = shortage.need
    engine = f" on {need.options.engine}" if need.options.engine else ""
    slots = f"{shortage.wanted} {need.role} {'slot' if shortage.wanted == 1 else 'slots'}"
    apart = ", each on a server of its own" if need.role is Role.INFERENCE and shortage.wanted > 1 else ""
    return f"waiting for {slots} of {need.base_model}{engine}{apart}: {shortage.obstacle.text}"


def _jobs(number: int) -> str:
    return f"{number} {'job' if number == 1 else 'jobs'}"
