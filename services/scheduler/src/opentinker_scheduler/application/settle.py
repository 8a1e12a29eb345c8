"""One tick inside its transaction: take in what ended, give out what is free, say why the rest waits.

What it decides is written here; the processes and sessions that follow from it are the reconciler's business,
and are derived anew from the rows at every tick, so that nothing depends on a tick being the last to see it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from opentinker_scheduler.application.changes import end_assignment, end_server, save_job
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Failure,
    Job,
    JobState,
    Role,
    Server,
    ServerState,
)
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.domain.planner import Capacity, Demand, Limits, Need, Plan, make_plan
from opentinker_scheduler.domain.replicas import Place, missing, suffices, urgency
from opentinker_scheduler.ports import Transaction
from opentinkerapi.runtime.reasons import Reason

_UNSETTLED = (JobState.QUEUED, JobState.STARTING)


@dataclass(frozen=True, slots=True)
class Ending:
    """A server that is gone."""

    server_id: str
    what: str
    """What happened to it, as in "exited with code 1"."""
    exit_code: int | None = None
    log_tail: str = ""
    counts: bool = True
    """Whether it is a crash of the jobs on it."""

    def cause(self, server: Server) -> Failure:
        """What jobs that had a slot there are told."""
        text = f"{server.role} server {server.name} ({server.base_model}) {self.what}"
        if not self.log_tail:
            return Failure(Reason.LAUNCH_FAILED, text, {"server": server.name})
        metadata = {"server": server.name, "log_path": server.log_path, "log_tail": self.log_tail[-240:]}
        return Failure(Reason.LAUNCH_FAILED, f"{text}; its log ends:\n{self.log_tail}", metadata)


@dataclass(frozen=True, slots=True)
class Observed:
    """What the tick saw outside the database."""

    endings: Sequence[Ending]
    lost_clients: Collection[str]
    """Jobs whose lease ran out."""
    overdue: Collection[str]
    """Assignments that their servers did not free in time."""
    idle_too_long: Collection[str]
    """Servers that have had no work for long."""
    attended: Collection[str]
    """Jobs whose clients were heard since this scheduler leads."""
    told: Mapping[str, frozenset[str]]
    """Assignments that each open session was told of."""


@dataclass(frozen=True, slots=True)
class Settled:
    """How things stand after the tick."""

    jobs: Sequence[Job]
    servers: Sequence[Server]
    assignments: Sequence[Assignment]
    policies: Mapping[str, tuple[str, ...]]
    """By job, the policies of those that a session is to be told of."""
    moving: bool
    """Something waits, starts or ends: look again soon."""


def settle(
    tx: Transaction,
    seen: Observed,
    limits: Limits,
    launcher_name: str,
    budget: rules.CrashBudget,
    now: datetime,
) -> Settled:
    """One tick. Everything it changes is in the one transaction."""
    for ending in seen.endings:
        server = tx.servers.find(ending.server_id)
        if server is not None and not server.state.ended:
            cause = ending.cause(server)
            end_server(tx, server, cause, now, budget, exit_code=ending.exit_code, counts=ending.counts)
    for job_id in seen.lost_clients:
        job = tx.jobs.find(job_id)
        if job is not None and not job.state.final and job.state is not JobState.PAUSED:
            save_job(tx, job, rules.client_lost(job, now), now)
    for assignment in tx.assignments.active() if seen.overdue else ():
        if assignment.id in seen.overdue and assignment.state is AssignmentState.RELEASING:
            end_assignment(tx, assignment, "taken back: its server did not free it in time", now)
    if any(map(_wants, tx.jobs.live())):
        _start_answering(tx, now)
        _place(tx, seen.attended, limits, launcher_name, budget, now)
    servers, assignments = tx.servers.live(), tx.assignments.active()
    servers = _drain_idle(tx, servers, assignments, seen.idle_too_long)
    jobs = tx.jobs.live()
    untold = {
        a.job_id for a in assignments if a.server_id in seen.told and a.id not in seen.told[a.server_id]
    }
    return Settled(
        jobs=jobs,
        servers=servers,
        assignments=assignments,
        policies={job_id: tuple(tx.catalog.policy_names(job_id)) for job_id in untold},
        moving=_moving(jobs, servers, assignments),
    )


def _moving(jobs: Sequence[Job], servers: Sequence[Server], assignments: Sequence[Assignment]) -> bool:
    return (
        any(job.state in _UNSETTLED for job in jobs)
        or any(server.state is not ServerState.READY for server in servers)
        or any(assignment.state is not AssignmentState.READY for assignment in assignments)
    )


def _wants(job: Job) -> bool:
    """Whether a job waits for slots: to start, or, while it runs without a replica, to be whole again."""
    return job.state in _UNSETTLED or (job.state is JobState.RUNNING and bool(job.state_reason))


def _start_answering(tx: Transaction, now: datetime) -> None:
    """A job runs when every slot's server is ready and says that the slot is; one that ran before, as soon
    as it can go on."""
    ready = {server.id for server in tx.servers.live() if server.state is ServerState.READY}
    by_job: dict[str, list[Assignment]] = {}
    for assignment in tx.assignments.active():
        by_job.setdefault(assignment.job_id, []).append(assignment)
    for job in tx.jobs.live():
        if job.state is JobState.QUEUED or not _wants(job):
            continue
        answering = [
            (a.slot_index, a.ordinal)
            for a in by_job.get(job.id, ())
            if a.state is AssignmentState.READY and a.server_id in ready
        ]
        complete = not missing(job, answering)
        goes_on = job.state is JobState.STARTING and job.start_time is not None and suffices(job, answering)
        if complete or goes_on:
            save_job(tx, job, rules.running(job, now, complete=complete), now)


def _place(
    tx: Transaction,
    attended: Collection[str],
    limits: Limits,
    launcher_name: str,
    budget: rules.CrashBudget,
    now: datetime,
) -> None:
    """Give slots to those who wait, and tell the others why they do."""
    jobs = {job.id: job for job in tx.jobs.live()}
    assignments = tx.assignments.active()
    demands, refused = _demands(jobs.values(), assignments, attended, budget, now)
    for job, reason in refused:
        _tell(tx, job, 0, reason, now)
    if not demands:
        return
    servers = tx.servers.live()
    running: dict[str, int] = {}
    for server in servers:
        if server.launched:
            running[server.options.engine] = running.get(server.options.engine, 0) + 1
    plan = make_plan(demands, _capacities(servers, assignments), limits, running, new_id)
    _write(tx, plan, jobs, launcher_name, now)


def _demands(
    jobs: Collection[Job],
    assignments: Sequence[Assignment],
    attended: Collection[str],
    budget: rules.CrashBudget,
    now: datetime,
) -> tuple[list[Demand], list[tuple[Job, str]]]:
    """What waiting jobs lack: first what stops those that lost slots, then their spare replicas, then the
    queue in order. And the jobs that get nothing now, with the reason.
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
    for job in jobs:
        have = held.get(job.id, ())
        if not _wants(job) or not missing(job, have):
            continue
        if job.id not in attended:
            reason = "waiting for its client: the scheduler restarted, and nobody asked for this job since"
            refused.append((job, reason))
        elif job.state is JobState.QUEUED:
            queue.append(Demand(job.id, _needs(job, missing(job, have))))
        else:
            needed, spare = urgency(job, have)
            if needed:
                urgent.append(Demand(job.id, _needs(job, needed), queued=False))
            if spare and job.state is JobState.RUNNING and (reason := rules.gives_up(job, now, budget)):
                refused.append((job, reason))
            elif spare:
                spares.append(Demand(job.id, _needs(job, spare), queued=False))
    return [*urgent, *spares, *queue], refused


def _needs(job: Job, places: Sequence[Place]) -> tuple[Need, ...]:
    return tuple(
        Need(index, ordinal, spec.role, spec.base_model, spec.options, spec.exclusive)
        for index, ordinal in places
        for spec in (job.slots[index],)
    )


def _capacities(servers: Sequence[Server], assignments: Sequence[Assignment]) -> list[Capacity]:
    taken: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        taken.setdefault(assignment.server_id, []).append(assignment)
    capacities: list[Capacity] = []
    for server in servers:
        if server.state is ServerState.DRAINING:
            continue
        on_it = taken.get(server.id, [])
        used = {assignment.slot_no for assignment in on_it}
        capacities.append(
            Capacity(
                server.id,
                server.role,
                server.base_model,
                server.options,
                free=[slot for slot in range(server.slots_total) if slot not in used],
                jobs={assignment.job_id for assignment in on_it},
                replicas={(a.job_id, a.slot_index) for a in on_it if a.role is Role.INFERENCE},
                exclusive=any(assignment.exclusive for assignment in on_it),
                launched=server.launched,
                ready=server.state is ServerState.READY,
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
    for job_id, (position, reason) in plan.waiting.items():
        _tell(tx, jobs[job_id], position, reason, now)
    for server_id in plan.evictions:
        server = tx.servers.find(server_id)
        if server is not None:
            tx.servers.save(replace(server, state=ServerState.DRAINING))


def _tell(tx: Transaction, job: Job, position: int, reason: str, now: datetime) -> None:
    save_job(tx, job, replace(job, queue_position=position, state_reason=reason), now)


def _drain_idle(
    tx: Transaction,
    servers: Sequence[Server],
    assignments: Sequence[Assignment],
    idle_too_long: Collection[str],
) -> Sequence[Server]:
    """Stop started servers that have had no work for long; the servers as they are then."""
    busy = {assignment.server_id for assignment in assignments}
    result: list[Server] = []
    for server in servers:
        if server.id in idle_too_long and server.id not in busy and server.state is ServerState.READY:
            server = replace(server, state=ServerState.DRAINING)
            tx.servers.save(server)
        result.append(server)
    return result
