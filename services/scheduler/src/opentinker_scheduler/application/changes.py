"""How a job changes in a transaction: its row, its slots and its announcement together."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, time, timedelta

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Failure,
    Job,
    JobState,
    Server,
    ServerState,
)
from opentinker_scheduler.domain.names import require
from opentinker_scheduler.domain.records import Fact
from opentinker_scheduler.domain.replicas import Place, suffices
from opentinker_scheduler.domain.shares import Used, used
from opentinker_scheduler.ports import Transaction
from opentinkerapi.runtime.reasons import Reason

_ANNOUNCED = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "started",
    JobState.PAUSED: "paused",
    JobState.PREEMPTED: "preempted",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}


def job_of(tx: Transaction, name: str, scope: str | None = None) -> Job:
    """The job of a name; JOB_NOT_FOUND, also for one outside the project that is looked at (None: all)."""
    (job_id,) = require(name, Reason.JOB_NOT_FOUND, "job", "jobs")
    job = tx.jobs.find(job_id)
    if job is None or scope not in (None, job.project):
        raise ServiceError(Reason.JOB_NOT_FOUND, f"there is no job {name}", field="name")
    return job


def add_job(tx: Transaction, job: Job, now: datetime) -> Job:
    """Record a new job."""
    job = tx.jobs.add(job)
    tx.history.add(job, now)
    _announce(tx, job, now)
    return job


def save_job(tx: Transaction, before: Job, after: Job, now: datetime) -> Job:
    """Write a changed job, announce a new state, and take back its slots where it no longer has a claim."""
    if after == before:
        return after
    after, seconds = rules.timed(before, after, now)
    if seconds > 0:
        count_usage(tx, before, now)
    if before.grant_time is None and after.grant_time is not None:
        # So that it is among the jobs that used something from its first second on.
        tx.usage.add(after, day_of(now), Used())
    after = tx.jobs.save(after)
    if (after.state, after.attempt) != (before.state, before.attempt):
        tx.history.add(after, now)
    if after.state is not before.state:
        _announce(tx, after, now)
        if not after.state.placed:
            release_slots(tx, tx.assignments.of_job(after.id), now)
    return after


def count_usage(tx: Transaction, job: Job, now: datetime) -> None:
    """Write down what a job used while it held slots, day by day."""
    for day, more in held_since_grant(job, now):
        tx.usage.add(job, day, more)


def held_since_grant(job: Job, now: datetime) -> Iterator[tuple[str, Used]]:
    """By UTC day, what a job uses with the slots that it holds."""
    start = job.grant_time
    while start is not None and start < now:
        midnight = datetime.combine(start.date() + timedelta(days=1), time(), start.tzinfo)
        end = min(midnight, now)
        yield day_of(start), used(job.cost, (end - start).total_seconds())
        start = end


def day_of(now: datetime) -> str:
    """The UTC day of a time, as usage is counted by."""
    return now.date().isoformat()


def release_slots(tx: Transaction, assignments: Iterable[Assignment], now: datetime) -> None:
    """Take slots back. They stay occupied until their server, if it was ever there, says they are free."""
    for assignment in assignments:
        if not assignment.state.held:
            continue
        server = tx.servers.find(assignment.server_id)
        if server is None or server.register_time is None:
            end_assignment(tx, assignment, "released before its server was there", now)
        else:
            tx.assignments.save(replace(assignment, state=AssignmentState.RELEASING, change_time=now))


def end_assignment(tx: Transaction, assignment: Assignment, message: str, now: datetime) -> None:
    """The slot is free."""
    ended = replace(assignment, state=AssignmentState.ENDED, message=message, change_time=now)
    tx.assignments.save(ended)


def end_server(
    tx: Transaction,
    server: Server,
    cause: Failure,
    now: datetime,
    budget: rules.CrashBudget,
    *,
    exit_code: int | None = None,
    counts: bool = True,
) -> None:
    """A server is gone: every slot of it is free, and jobs that had one start again or fail."""
    orderly = server.state is ServerState.DRAINING
    ended = replace(
        server,
        state=ServerState.STOPPED if orderly else ServerState.LOST,
        end_time=now,
        end_reason=cause.message,
        exit_code=exit_code,
    )
    tx.servers.save(ended)
    if not orderly:
        reason = cause.message.splitlines()[0]
        tx.outbox.add(Fact("server_lost", server.name, detail={"reason": reason}), now)
    hit: dict[str, None] = {}
    for assignment in tx.assignments.of_server(server.id):
        if assignment.state.held:
            hit[assignment.job_id] = None
        end_assignment(tx, assignment, cause.message.splitlines()[0], now)
    for job_id in hit:
        restart_job(tx, job_id, cause, now, budget, counts=counts)


def restart_job(
    tx: Transaction, job_id: str, cause: Failure, now: datetime, budget: rules.CrashBudget, *, counts: bool
) -> None:
    """A placed job lost a slot: it starts again, or goes on with the other replicas of that slot."""
    job = tx.jobs.find(job_id)
    if job is None or not job.state.placed:
        return
    goes_on = job.state is JobState.RUNNING and suffices(job, answering(tx, job_id))
    lost = rules.lost_replica if goes_on else rules.lost_server
    save_job(tx, job, lost(job, cause, now, budget, counts=counts), now)


def answering(tx: Transaction, job_id: str) -> list[Place]:
    """The slots of a job that can be used now."""
    ready = [a for a in tx.assignments.of_job(job_id) if a.state is AssignmentState.READY]
    servers = {a.server_id: tx.servers.find(a.server_id) for a in ready}
    return [
        (a.slot_index, a.ordinal)
        for a in ready
        if (server := servers[a.server_id]) is not None and server.state is ServerState.READY
    ]


def note_progress(tx: Transaction, job_id: str, now: datetime) -> None:
    """Something durable was achieved for a job: it is not idle, and crashes before no longer count."""
    job = tx.jobs.find(job_id) if job_id else None
    if job is not None and not job.state.final and (after := rules.progressed(job, now)) != job:
        tx.jobs.save(after)


def check_attempt(tx: Transaction, job_id: str, attempt: int) -> None:
    """STALE_ATTEMPT unless a trainer holds a slot of the job under this attempt."""
    held = [a for a in tx.assignments.of_job(job_id) if a.state.held and a.role == "trainer"]
    if not any(assignment.attempt == attempt for assignment in held):
        newest = max((assignment.attempt for assignment in held), default=0)
        now_held = f"the trainer slot is held under attempt {newest}" if held else "it holds no trainer slot"
        text = f"attempt {attempt} of jobs/{job_id} is over: {now_held}"
        metadata = {"attempt": newest, "job": f"jobs/{job_id}"}
        raise ServiceError(Reason.STALE_ATTEMPT, text, metadata=metadata)


def _announce(tx: Transaction, job: Job, now: datetime) -> None:
    if state := _ANNOUNCED.get(job.state):
        reason = job.error.message if job.error is not None else job.state_reason
        detail: dict[str, str | int] = {"state": state, "reason": reason[:500], "attempt": job.attempt}
        tx.outbox.add(Fact("job", job.name, detail=detail), now)
