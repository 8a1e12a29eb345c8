"""A cluster of plain values that plans are applied to, second by second, to see what becomes of a queue."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import count

from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Cost, Role, ServerOptions
from opentinker_scheduler.domain.planner import Cluster, Grant, Plan, make_plan
from opentinker_scheduler.domain.reservations import Tenure
from opentinker_scheduler.domain.shares import Shares, Tenants

OPTIONS = ServerOptions(engine="noop")


@dataclass
class Running:
    """A job that was placed."""

    demand: Demand
    grant: Grant
    start: float
    ends: float


@dataclass
class Simulation:
    """Servers that registered themselves, and jobs that last as long as they are said to."""

    servers: dict[str, int]
    reserve_after_s: float = 0.0
    tenants: Tenants = field(default_factory=Tenants)
    now: float = 0.0
    queue: list[Demand] = field(default_factory=list)
    lasts: dict[str, float] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    ids: "count[int]" = field(default_factory=count)

    def submit(
        self, slots: int, lasts: float, limit_s: float | None = None, name: str = "", **more: object
    ) -> str:
        """A job that wants trainer slots for so many seconds."""
        job = name or f"j{next(self.ids)}"
        exclusive = bool(more.pop("exclusive", False))
        needs = tuple(Need(0, i, Role.TRAINER, "m", OPTIONS, exclusive) for i in range(slots))
        demand = Demand(job, needs, cost=Cost(float(slots)), since=self.now, limit_s=limit_s)
        self.queue.append(replace(demand, **more))  # type: ignore[arg-type]
        self.lasts[job] = lasts
        return job

    def tick(self, seconds: float = 1.0) -> None:
        """Plan, then let time pass."""
        for job in [job for job, one in self.running.items() if one.ends <= self.now]:
            del self.running[job]
        held: dict[str, Cost] = {}
        for one in self.running.values():
            project = one.demand.project
            held[project] = held.get(project, Cost()) + one.demand.cost
        cluster = Cluster(
            Limits(can_launch=False, reserve_after_s=self.reserve_after_s),
            shares=Shares(self.tenants, Cost(float(sum(self.servers.values()))), held),
            tenures=lambda: [self._tenure(one) for one in self.running.values()],
            now=self.now,
        )
        capacities = self.capacities()
        self.plan = make_plan(self.queue, deepcopy(capacities), cluster, lambda: "none")
        waiting = {demand.job_id: demand for demand in self.queue}
        given = [(p.server_id, p.slot_no) for grant in self.plan.grants for p in grant.placements]
        free = {(one.server_id, slot) for one in capacities for slot in one.free}
        assert len(given) == len(set(given))
        assert set(given) <= free, "a slot with two owners"
        for grant in self.plan.grants:
            demand = waiting[grant.job_id]
            assert tuple(p.need for p in grant.placements) == demand.needs
            self.queue.remove(demand)
            self.started[grant.job_id] = self.now
            ends = self.now + self.lasts[grant.job_id]
            self.running[grant.job_id] = Running(demand, grant, self.now, ends)
        self.now += seconds

    def capacities(self) -> list[Capacity]:
        """The servers as they are."""
        owners: dict[str, dict[int, str]] = {name: {} for name in self.servers}
        alone: set[str] = set()
        for job, one in self.running.items():
            for p in one.grant.placements:
                owners[p.server_id][p.slot_no] = job
                if p.need.exclusive:
                    alone.add(p.server_id)
        return [
            Capacity(
                name,
                Role.TRAINER,
                "m",
                OPTIONS,
                free=[slot for slot in range(slots) if slot not in owners[name]],
                jobs=set(owners[name].values()),
                exclusive=name in alone,
                launched=False,
                taken=owners[name],
            )
            for name, slots in self.servers.items()
        ]

    def free(self) -> int:
        return sum(len(one.free) for one in self.capacities())

    def _tenure(self, one: Running) -> Tenure:
        limit_s = one.demand.limit_s
        ends_s = None if limit_s is None else max(0.0, one.start + limit_s - self.now)
        return Tenure(one.demand.job_id, ends_s, one.start)
