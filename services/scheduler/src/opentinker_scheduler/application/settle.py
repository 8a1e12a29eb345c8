"""One tick inside its transaction: take in what ended, give out what is free, say why the rest waits.

What it decides is written here; the processes and sessions that follow from it are the reconciler's business,
and are derived anew from the rows at every tick, so that nothing depends on a tick being the last to see it.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from opentinker_scheduler.application.changes import answering, end_assignment, end_server, save_job
from opentinker_scheduler.application.placing import UNSETTLED, Placing, wants
from opentinker_scheduler.application.warm import key_of
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.limits import Key
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Failure,
    Job,
    JobState,
    Server,
    ServerState,
)
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.replicas import missing, suffices
from opentinker_scheduler.ports import Transaction
from opentinkerapi.runtime.reasons import Reason


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
    nodes: Sequence[Node] = ()
    """Where servers can be started."""
    waits: Mapping[str, str] = field(default_factory=dict)
    """What servers that are being started wait for."""


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


def settle(tx: Transaction, seen: Observed, placing: Placing, now: datetime) -> Settled:
    """One tick. Everything it changes is in the one transaction."""
    budget = placing.terms.budget
    for ending in seen.endings:
        server = tx.servers.find(ending.server_id)
        if server is not None and not server.state.ended:
            cause = ending.cause(server)
            end_server(tx, server, cause, now, budget, exit_code=ending.exit_code, counts=ending.counts)
    for job_id in seen.lost_clients:
        job = tx.jobs.find(job_id)
        if job is not None and not job.state.final and job.state is not JobState.PAUSED:
            save_job(tx, job, rules.client_lost(job, now), now)
    for assignment_id in seen.overdue:
        assignment = tx.assignments.find(assignment_id)
        if assignment is not None and assignment.state is AssignmentState.RELEASING:
            end_assignment(tx, assignment, "taken back: its server did not free it in time", now)
    jobs = tx.jobs.unsorted()
    for job in jobs:
        limited = job.max_duration_s > 0 or job.idle_limit_s > 0
        if limited and (why := rules.overran(job, now)) is not None:
            save_job(tx, job, rules.expired(job, why, now), now)
        if job.state is JobState.PREEMPTED and not tx.assignments.of_job(job.id):
            save_job(tx, job, rules.requeued(job), now)
    jobs = tx.jobs.unsorted()
    if any(map(wants, jobs)) or placing.warm.lacking(tx, now):
        _start_answering(tx, jobs, now)
        placing.place(tx, seen.attended, seen.nodes, now)
    _end_unwanted(tx, placing, now)
    jobs = tx.jobs.unsorted()
    servers, assignments = tx.servers.live(), tx.assignments.active()
    _tell_who_starts(tx, jobs, assignments, seen.waits)
    surplus = placing.warm.surplus(servers)
    servers = _drain_idle(tx, servers, assignments, seen.idle_too_long, surplus)
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
        any(job.state in UNSETTLED or job.state is JobState.PREEMPTED for job in jobs)
        or any(server.state is not ServerState.READY for server in servers)
        or any(assignment.state is not AssignmentState.READY for assignment in assignments)
    )


def _start_answering(tx: Transaction, jobs: Sequence[Job], now: datetime) -> None:
    """A job runs when every slot's server is ready and says that the slot is; one that ran before, as soon
    as it can go on."""
    for seen in jobs:
        if seen.state is JobState.QUEUED or not wants(seen):
            continue
        job = tx.jobs.find(seen.id)
        if job is None or not job.state.placed:
            continue
        places = answering(tx, job.id)
        complete = not missing(job, places)
        goes_on = job.state is JobState.STARTING and job.start_time is not None and suffices(job, places)
        if complete or goes_on:
            save_job(tx, job, rules.running(job, now, complete=complete), now)


def _end_unwanted(tx: Transaction, placing: Placing, now: datetime) -> None:
    """Give up servers that have no process yet where nobody waits for them any more; whatever is being
    started for them is ended as any process that no server claims."""
    starting = [
        server
        for server in tx.servers.live()
        if server.launched
        and server.state is ServerState.LAUNCHING
        and not (server.pid or server.instance_id)
    ]
    if not starting:
        return
    surplus = placing.warm.surplus(tx.servers.live())
    for server in starting:
        if not tx.assignments.of_server(server.id) and _spare(server, surplus):
            draining = replace(server, state=ServerState.DRAINING)
            cause = Failure("", "nobody waited for it any more before it had started")
            end_server(tx, draining, cause, now, placing.terms.budget, counts=False)


def _spare(server: Server, surplus: Counter[Key]) -> bool:
    """Whether a server may go; one of a kind of which some are to be kept is then counted as gone."""
    key = key_of(server)
    if key not in surplus:
        return True
    surplus[key] -= 1
    return surplus[key] >= 0


def _tell_who_starts(
    tx: Transaction, jobs: Sequence[Job], assignments: Sequence[Assignment], waits: Mapping[str, str]
) -> None:
    """Say what a job's servers wait for, where that is something a person can do something about."""
    if not waits:
        return
    starting = {job.id for job in jobs if job.state is JobState.STARTING}
    for assignment in assignments:
        if assignment.job_id in starting and (text := waits.get(assignment.server_id)):
            tx.jobs.tell(assignment.job_id, 0, f"starting: {text}")


def _drain_idle(
    tx: Transaction,
    servers: Sequence[Server],
    assignments: Sequence[Assignment],
    idle_too_long: Collection[str],
    surplus: Counter[Key],
) -> Sequence[Server]:
    """Stop started servers that have had no work for long; the servers as they are then."""
    busy = {assignment.server_id for assignment in assignments}
    result: list[Server] = []
    for server in servers:
        idle = server.id in idle_too_long and server.id not in busy and server.state is ServerState.READY
        if idle and _spare(server, surplus):
            server = replace(server, state=ServerState.DRAINING)
            tx.servers.save(server)
        result.append(server)
    return result
