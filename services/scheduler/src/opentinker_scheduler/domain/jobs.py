"""The life of a job, as functions from a job to the job after.

    QUEUED -> STARTING -> RUNNING -> SUCCEEDED | FAILED | CANCELLED

with PAUSED (holds nothing until resumed) and PREEMPTED (checkpointed and put back). `attempt` grows whenever
slots are granted or lost, so that what an older holder still says can be told from what the newest one says.
A job with replicas stays RUNNING when it loses one and gets it back.

A job holds slots from its grant until it has no more claim on any; `timed` counts that time, against the
limit that the job has and for its project's usage.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.model import Failure, Job, JobState, OnClientLoss
from opentinkerapi.runtime.reasons import Reason

S = JobState
SUCCESSORS: Mapping[JobState, frozenset[JobState]] = {
    S.QUEUED: frozenset({S.STARTING, S.PAUSED, S.CANCELLED, S.FAILED}),
    S.STARTING: frozenset({S.RUNNING, S.QUEUED, S.STARTING, S.PAUSED, S.SUCCEEDED, S.CANCELLED, S.FAILED}),
    S.RUNNING: frozenset({S.STARTING, S.RUNNING, S.PAUSED, S.PREEMPTED, S.SUCCEEDED, S.CANCELLED, S.FAILED}),
    S.PAUSED: frozenset({S.QUEUED, S.SUCCEEDED, S.CANCELLED, S.FAILED}),
    S.PREEMPTED: frozenset({S.QUEUED, S.PAUSED, S.SUCCEEDED, S.CANCELLED, S.FAILED}),
    S.SUCCEEDED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class CrashBudget:
    """How many crashes a job may have within a while, without progress between them, before it fails."""

    limit: int = 3
    window: timedelta = timedelta(minutes=10)


def move(job: Job, state: JobState, *, reason: str, verb: str) -> Job:
    """The job in another state. INVALID_STATE, naming what was asked, if the step is not legal."""
    if state not in SUCCESSORS[job.state]:
        raise ServiceError(
            Reason.INVALID_STATE,
            f"{job.name} is {job.state.upper()} and cannot {verb}",
            metadata={"job": job.name, "state": job.state.upper()},
        )
    return replace(job, state=state, state_reason=reason, queue_position=0, estimated_start_time=None)


def granted(job: Job) -> Job:
    """All slots were given, or lost ones were given back: servers load, under a new attempt."""
    if job.state is S.RUNNING:
        # A spare replica: the job goes on meanwhile.
        return job
    new = job.state is S.QUEUED
    reason = "starting: waiting for its servers" if new else job.state_reason
    job = move(job, S.STARTING, reason=reason, verb="start")
    # One that lost slots got its new attempt at the loss.
    return replace(job, attempt=job.attempt + new)


def running(job: Job, now: datetime, *, complete: bool = True) -> Job:
    """Every slot answers, or (not `complete`) enough of them to go on."""
    reason = "" if complete else "replacing a replica"
    if job.state is not S.RUNNING:
        job = move(job, S.RUNNING, reason=reason, verb="run")
        if job.idle_limit_s > 0:
            job = replace(job, progress_time=now)
    return replace(job, start_time=job.start_time or now, state_reason=reason, queue_position=0)


def finished(job: Job, outcome: JobState, message: str, now: datetime) -> Job:
    """Ended by its driver, with SUCCEEDED or FAILED."""
    job = move(job, outcome, reason="", verb=f"finish as {outcome.upper()}")
    error = job.error
    if outcome is S.FAILED:
        error = Failure("", message or "its driver reported a failure")
    return replace(job, outcome_message=message, end_time=now, error=error)


def cancelled(job: Job, message: str, now: datetime) -> Job:
    """Ended by CancelJob, or by the loss of a client that asked for it."""
    job = move(job, S.CANCELLED, reason=message, verb="be cancelled")
    return replace(job, end_time=now)


def paused(job: Job, reason: str) -> Job:
    """Holds no capacity until it is resumed."""
    return move(job, S.PAUSED, reason=reason, verb="be paused")


def preempted(job: Job) -> Job:
    """Gives its slots to another; its trainer saves it as they are taken back."""
    reason = "gives way to a job of higher priority; it goes on from where it is when there is room"
    return move(job, S.PREEMPTED, reason=reason, verb="be preempted")


def requeued(job: Job) -> Job:
    """Its slots are free, so it waits again: at its old place, as it did nothing to lose it."""
    return move(job, S.QUEUED, reason="queued", verb="be queued again")


def resumed(job: Job, now: datetime) -> Job:
    """Back at the end of the queue."""
    job = move(job, S.QUEUED, reason="queued", verb="be resumed")
    return replace(job, queue_time=now, crashes=())


def client_lost(job: Job, now: datetime) -> Job:
    """Nobody renewed its lease in time. A detached job has none to lose."""
    if job.on_client_loss is OnClientLoss.DETACH:
        return job
    reason = f"no client renewed its lease for {job.lease_ttl_s:g} s"
    if job.on_client_loss is OnClientLoss.CANCEL:
        return cancelled(job, reason, now)
    return paused(job, f"{reason}; ResumeJob goes on from the last checkpoint")


def lost_server(job: Job, cause: Failure, now: datetime, budget: CrashBudget, *, counts: bool = True) -> Job:
    """A server of a placed job is gone: start again under a new attempt, or fail at one crash too many.

    `counts` is False for ends that are nobody's fault (we stopped the server).
    """
    crashes = _crashes(job, now, budget, counts=counts)
    if len(crashes) >= budget.limit:
        job = move(job, S.FAILED, reason="", verb="fail")
        metadata = {**cause.metadata, "crashes": str(len(crashes))}
        text = f"{cause.message} (crash {len(crashes)} of {budget.limit} within {budget.window}, no progress)"
        return replace(job, crashes=crashes, end_time=now, error=Failure(cause.reason, text, metadata))
    job = move(job, S.STARTING, reason=f"restarting: {cause.message.splitlines()[0]}", verb="restart")
    return replace(job, crashes=crashes, attempt=job.attempt + 1)


def lost_replica(job: Job, cause: Failure, now: datetime, budget: CrashBudget, *, counts: bool = True) -> Job:
    """A running job lost a replica and goes on with the others. The crash counts, but as long as another
    replica answers it fails no job: `gives_up` says when no more are started instead.
    """
    crashes = _crashes(job, now, budget, counts=counts)
    reason = f"replacing a replica: {cause.message.splitlines()[0]}"
    return replace(job, crashes=crashes, attempt=job.attempt + 1, state_reason=reason)


def gives_up(job: Job, now: datetime, budget: CrashBudget) -> str:
    """Why no replica of a running job is replaced now; empty where one may be."""
    crashes = len(_crashes(job, now, budget, counts=False))
    if crashes < budget.limit:
        return ""
    return f"going on without a replica: {crashes} crashes within {budget.window}, no progress"


def _crashes(job: Job, now: datetime, budget: CrashBudget, *, counts: bool) -> tuple[datetime, ...]:
    recent = tuple(at for at in job.crashes if now - at < budget.window)
    return (*recent, now) if counts else recent


def progressed(job: Job, now: datetime) -> Job:
    """Something durable was achieved, so earlier crashes no longer count and it is not idle."""
    if job.idle_limit_s > 0 and job.state is S.RUNNING:
        job = replace(job, progress_time=now)
    return replace(job, crashes=()) if job.crashes else job


def timed(before: Job, after: Job, now: datetime) -> tuple[Job, float]:
    """A changed job with the time that it held slots written down, and how many seconds that were since its
    last grant where it now gave them up.
    """
    if after.state.placed and after.grant_time is None:
        return replace(after, grant_time=now), 0.0
    if after.state.placed or before.grant_time is None:
        return after, 0.0
    seconds = max(0.0, (now - before.grant_time).total_seconds())
    return replace(after, grant_time=None, held_s=before.held_s + seconds), seconds


def overran(job: Job, now: datetime) -> Failure | None:
    """Why a job must end now: a limit of its own is reached."""
    if not job.state.placed:
        return None
    held_s = job.held_until(now)
    if 0 < job.max_duration_s <= held_s:
        text = f"it held slots for {held_s:.0f} s; its max_duration is {job.max_duration_s:g} s"
        return Failure(Reason.TIME_LIMIT, text, {"max_duration_s": f"{job.max_duration_s:g}"})
    if job.state is S.RUNNING and job.idle_limit_s > 0 and job.progress_time is not None:
        idle_s = (now - job.progress_time).total_seconds()
        if idle_s >= job.idle_limit_s:
            text = f"it made no progress for {idle_s:.0f} s; its idle_limit is {job.idle_limit_s:g} s"
            return Failure(Reason.IDLE_LIMIT, text, {"idle_limit_s": f"{job.idle_limit_s:g}"})
    return None


def expired(job: Job, why: Failure, now: datetime) -> Job:
    """Ended by a limit of its own."""
    return replace(move(job, S.FAILED, reason="", verb="expire"), error=why, end_time=now)
