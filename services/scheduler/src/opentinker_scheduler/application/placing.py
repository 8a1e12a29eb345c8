"""The queue's part of a tick: slots for those who wait, and for the others what they wait for."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time
from itertools import islice

from opentinker_scheduler.application.changes import day_of, save_job
from opentinker_scheduler.application.estimating import Estimates
from opentinker_scheduler.application.warm import WarmServers, key_of
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.floor import Capacity, Demand, Need
from opentinker_scheduler.domain.limits import Key, Limits
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Cost,
    Job,
    JobState,
    Role,
    Server,
    ServerState,
    SlotSpec,
)
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.planner import Cluster, Plan, make_plan
from opentinker_scheduler.domain.preemption import Candidate
from opentinker_scheduler.domain.replicas import Place, missing, urgency
from opentinker_scheduler.domain.reservations import Tenure
from opentinker_scheduler.domain.shares import NOTHING, Shares, Tenants
from opentinker_scheduler.ports import Transaction

UNSETTLED = (JobState.QUEUED, JobState.STARTING)

_TELL_AT_ONCE = 200
"""So many waiting jobs are told at a tick what they wait for; in a longer queue the rest at the next ones."""
_MAX_SHAPES = 10_000


def wants(job: Job) -> bool:
    """Whether a job waits for slots: to start, or, while it runs without a replica, to be whole again."""
    return job.state in UNSETTLED or (job.state is JobState.RUNNING and bool(job.state_reason))


@dataclass(frozen=True, slots=True)
class Terms:
    """By what the queue is moved."""

    limits: Limits
    tenants: Tenants
    budget: rules.CrashBudget
    launcher_name: str
    preemption: bool = False
    """Whether jobs give way to those of higher priority."""
    preempt_after_s: float = 60.0
    """For how long a job keeps its slots at least."""


class Placing:
    """Remembers between ticks what can be found out again: what queued jobs ask for, when all were told."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.warm = WarmServers()
        self._asked: dict[str, tuple[datetime, Demand]] = {}
        self._shapes: dict[tuple[SlotSpec, ...], int] = {}
        self._telling: Iterator[tuple[str, int, str]] = iter(())
        self._estimates = Estimates()

    def place(self, tx: Transaction, attended: Collection[str], nodes: Sequence[Node], now: datetime) -> None:
        """Give slots to those who wait, and tell the others why they do."""
        jobs = {job.id: job for job in tx.jobs.live()}
        assignments = tx.assignments.active()
        demands, refused = self._demands(jobs.values(), assignments, attended, now)
        for job, reason in refused:
            tx.jobs.tell(job.id, 0, reason)
        lacking = self.warm.lacking(tx, now)
        if not demands and not lacking:
            return
        servers = tx.servers.live()
        placed = [job for job in jobs.values() if job.state.placed]
        limits = replace(self.terms.limits, nodes=tuple(nodes))
        ours = [server for server in servers if server.launched]
        leaving = [server for server in ours if server.state is ServerState.DRAINING]
        cluster = Cluster(
            limits=limits,
            running=_by_engine(ours),
            leaving=_by_engine(leaving),
            devices=_devices(ours),
            coming=_devices(leaving),
            shares=self._shares(tx, placed, servers, limits, now),
            tenures=lambda: [_tenure(job, now) for job in placed],
            candidates=(lambda: self._candidates(placed, now)) if self.terms.preemption else None,
            yielding=any(job.state is JobState.PREEMPTED for job in jobs.values()),
            now=now.timestamp(),
            lacking=lacking,
        )
        surplus = self.warm.surplus(servers)
        capacities = _capacities(servers, assignments, surplus)
        plan = make_plan(demands, capacities, cluster, new_id)
        _write(tx, plan, jobs, self.terms.launcher_name, now)
        self.warm.started(plan.launches)
        self._tell(tx, plan, capacities, jobs, now)

    def _tell(
        self,
        tx: Transaction,
        plan: Plan,
        servers: Sequence[Capacity],
        jobs: Mapping[str, Job],
        now: datetime,
    ) -> None:
        """Tell those who wait where they stand, some at a time: in a long queue a grant moves everyone."""
        told = 0
        for job_id, position, reason in self._telling:
            job = tx.jobs.find(job_id)
            # Since this was found out, it may have been placed.
            if job is not None and wants(job) and (position == 0 or job.state is JobState.QUEUED):
                tx.jobs.tell(job_id, position, reason, self._estimates.of(job_id))
            told += 1
            if told >= _TELL_AT_ONCE:
                return
        self._estimates.look(tx, plan, servers, jobs, now)
        self._telling = plan.waiting()
        for job_id, position, reason in islice(self._telling, _TELL_AT_ONCE - told):
            tx.jobs.tell(job_id, position, reason, self._estimates.of(job_id))

    def _candidates(self, placed: Iterable[Job], now: datetime) -> list[Candidate]:
        """Who may be asked to give way: jobs that run, not those whose servers are only starting."""
        return [
            Candidate(job.id, job.priority, job.grant_time.timestamp())
            for job in placed
            if job.state is JobState.RUNNING
            and job.grant_time is not None
            and (now - job.grant_time).total_seconds() >= self.terms.preempt_after_s
        ]

    def _shares(
        self,
        tx: Transaction,
        placed: Sequence[Job],
        servers: Sequence[Server],
        limits: Limits,
        now: datetime,
    ) -> Shares:
        """How the cluster is divided now."""
        tenants = self.terms.tenants
        held: dict[str, Cost] = {}
        for job in placed:
            held[job.project] = held.get(job.project, NOTHING) + job.cost
        there = [server for server in servers if server.state is not ServerState.DRAINING]
        slots = sum(server.slots_total for server in there)
        if limits.nodes:
            gpus = sum(node.gpus for node in limits.nodes)
        else:
            gpus = sum(limits.gpus_of(server.role, server.options) for server in there)
        spent: dict[str, float] = {}
        metered = tenants.meters_gpus or tenants.meters_tokens
        today = tx.usage.of_day(day_of(now)) if metered else {}
        tokens = {project: used.tokens_trained + used.tokens_sampled for project, used in today.items()}
        if tenants.meters_gpus:
            spent = {project: used.gpu_seconds for project, used in today.items()}
            midnight = datetime.combine(now.date(), time(), now.tzinfo)
            for job in placed:
                since = max(job.grant_time or now, midnight)
                seconds = max(0.0, (now - since).total_seconds())
                spent[job.project] = spent.get(job.project, 0.0) + job.cost_gpus * seconds
        return Shares(tenants, Cost(float(slots), float(gpus)), held, spent, tokens)

    def _demands(
        self,
        jobs: Collection[Job],
        assignments: Sequence[Assignment],
        attended: Collection[str],
        now: datetime,
    ) -> tuple[list[Demand], list[tuple[Job, str]]]:
        """What waiting jobs lack: first what stops those that lost slots, then their spare replicas, then
        the queue by time. And the jobs that get nothing now, with the reason.
        """
        held: dict[str, list[Place]] = {}
        for assignment in assignments:
            if assignment.state.held:
                place = (assignment.slot_index, assignment.ordinal)
                held.setdefault(assignment.job_id, []).append(place)
        urgent: list[Demand] = []
        spares: list[Demand] = []
        queue: list[Demand] = []
        refused: list[tuple[Job, str]] = []
        asked: dict[str, tuple[datetime, Demand]] = {}
        for job in jobs:
            queued = job.state is JobState.QUEUED
            have = () if queued else held.get(job.id, ())
            if not queued and not (wants(job) and missing(job, have)):
                continue
            if job.id not in attended:
                reason = (
                    "waiting for its client: the scheduler restarted, and nobody asked for this job since"
                )
                refused.append((job, reason))
            elif queued:
                known = self._asked.get(job.id)
                if known is None or known[0] != job.queue_time:
                    known = (job.queue_time, self._queued(job))
                asked[job.id] = known
                queue.append(known[1])
            else:
                needed, spare = urgency(job, have)
                if needed:
                    urgent.append(Demand(job.id, _needs(job, needed), queued=False))
                if not spare:
                    continue
                if job.state is JobState.RUNNING and (reason := rules.gives_up(job, now, self.terms.budget)):
                    refused.append((job, reason))
                else:
                    spares.append(Demand(job.id, _needs(job, spare), queued=False))
        self._asked = asked
        return [*urgent, *spares, *queue], refused

    def _queued(self, job: Job) -> Demand:
        """All that a queued job asks for."""
        if len(self._shapes) > _MAX_SHAPES:
            self._shapes.clear()
            self._asked.clear()
        return Demand(
            job.id,
            _needs(job, missing(job, ())),
            project=job.project,
            cost=job.cost,
            priority=job.priority,
            since=job.queue_time.timestamp(),
            limit_s=max(0.0, job.max_duration_s - job.held_s) if job.max_duration_s > 0 else None,
            shape=self._shapes.setdefault(job.slots, len(self._shapes)),
        )


def _tenure(job: Job, now: datetime) -> Tenure:
    since = (job.grant_time or now).timestamp()
    if job.max_duration_s <= 0:
        return Tenure(job.id, None, since)
    return Tenure(job.id, max(0.0, job.max_duration_s - job.held_until(now)), since)


def _needs(job: Job, places: Sequence[Place]) -> tuple[Need, ...]:
    return tuple(
        Need(index, ordinal, spec.role, spec.base_model, spec.options, spec.exclusive)
        for index, ordinal in places
        for spec in (job.slots[index],)
    )


def _by_engine(servers: Iterable[Server]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for server in servers:
        counts[server.options.engine] = counts.get(server.options.engine, 0) + 1
    return counts


def _devices(servers: Iterable[Server]) -> frozenset[str]:
    return frozenset(device for server in servers for device in server.devices)


def _capacities(
    servers: Sequence[Server], assignments: Sequence[Assignment], surplus: Mapping[Key, int]
) -> list[Capacity]:
    taken: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        taken.setdefault(assignment.server_id, []).append(assignment)
    capacities: list[Capacity] = []
    for server in servers:
        if server.state is ServerState.DRAINING:
            continue
        on_it = taken.get(server.id, [])
        owners = {assignment.slot_no: assignment.job_id for assignment in on_it}
        capacities.append(
            Capacity(
                server.id,
                server.role,
                server.base_model,
                server.options,
                free=[slot for slot in range(server.slots_total) if slot not in owners],
                jobs=set(owners.values()),
                replicas={(a.job_id, a.slot_index) for a in on_it if a.role is Role.INFERENCE},
                exclusive=any(assignment.exclusive for assignment in on_it),
                launched=server.launched,
                ready=server.state is ServerState.READY,
                taken=owners,
                devices=server.devices,
                warm=surplus.get(key_of(server), 1) < 1,
            )
        )
    return capacities


def _write(tx: Transaction, plan: Plan, jobs: dict[str, Job], launcher_name: str, now: datetime) -> None:
    for new in plan.launches:
        tx.servers.add(
            Server(
                id=new.server_id,
                role=new.role,
                base_model=new.base_model,
                options=new.options,
                state=ServerState.LAUNCHING,
                slots_total=new.slots,
                launcher=launcher_name,
                start_time=now,
                devices=new.devices,
            )
        )
    for grant in plan.grants:
        before = jobs[grant.job_id]
        job = jobs[before.id] = save_job(tx, before, rules.granted(before), now)
        for placement in grant.placements:
            need = placement.need
            tx.assignments.add(
                Assignment(
                    id=new_id("a"),
                    job_id=job.id,
                    server_id=placement.server_id,
                    slot_no=placement.slot_no,
                    slot_index=need.slot_index,
                    ordinal=need.ordinal,
                    role=need.role,
                    attempt=job.attempt,
                    exclusive=need.exclusive,
                    state=AssignmentState.GRANTED,
                    create_time=now,
                    change_time=now,
                )
            )
    for job_id in plan.preempted:
        save_job(tx, jobs[job_id], rules.preempted(jobs[job_id]), now)
    for server_id in plan.evictions:
        server = tx.servers.find(server_id)
        if server is not None:
            tx.servers.save(replace(server, state=ServerState.DRAINING))
