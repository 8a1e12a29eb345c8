"""Jobs on behalf of their clients: create, end, pause, resume, keep alive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.job_tokens import INFERENCE
from opentinker_scheduler.application.changes import add_job, job_of, save_job
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.tokens import JobTokens
from opentinker_scheduler.domain import admission
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import (
    AssignmentState,
    Job,
    JobKind,
    JobState,
    OnClientLoss,
    Role,
    SlotSpec,
)
from opentinker_scheduler.domain.names import MAX_NAME, check_text, new_id, require
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.shares import Tenants, cost_of
from opentinker_scheduler.ports import ModelSource, Transaction
from opentinkerapi.runtime.reasons import Reason

MAX_MESSAGE = 10_000


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a client asks for."""

    kind: JobKind
    slots: tuple[SlotSpec, ...]
    display_name: str
    on_client_loss: OnClientLoss
    lease_ttl_s: float
    """0: the cluster's default."""
    labels: dict[str, str]
    run: str
    priority: int = 0
    max_duration_s: float = 0.0
    """0: the cluster's default."""
    idle_limit_s: float = 0.0
    """0: none."""


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    """Where one slot of a job is served."""

    role: Role
    server: str
    address: str
    attempt: int
    base_model: str
    slot_index: int


@dataclass(frozen=True, slots=True)
class RenewedLease:
    """What a client learns when it renews."""

    job: Job
    endpoints: tuple[JobEndpoint, ...]
    """Empty unless the job runs."""


class Jobs:
    """See the module's text. Methods with a transaction are called inside one; the others around it."""

    def __init__(
        self,
        offer: admission.Offer,
        models: ModelSource,
        leases: Leases,
        tokens: JobTokens,
        clock: Clock,
        default_lease_s: float,
        tenants: Tenants,
        default_duration_s: float = 0.0,
        nodes: Callable[[], Sequence[Node]] = tuple,
    ) -> None:
        self._offer = offer
        self._models = models
        self._leases = leases
        self._tokens = tokens
        self._clock = clock
        self._default_lease_s = default_lease_s
        self._tenants = tenants
        self._default_duration_s = default_duration_s
        self._nodes = nodes

    async def admit(self, asked: NewJob) -> NewJob:
        """The job with everything filled in, or why it can never run here."""
        asked = replace(asked, lease_ttl_s=asked.lease_ttl_s or self._default_lease_s)
        if not asked.max_duration_s and asked.on_client_loss is not OnClientLoss.DETACH:
            # What nobody drives is meant to stay: deployments have no limit unless one is asked for.
            asked = replace(asked, max_duration_s=self._default_duration_s)
        check_text(asked.display_name, MAX_NAME, "job.display_name")
        admission.check_limits(asked.kind, asked.priority, asked.max_duration_s, asked.idle_limit_s)
        admission.check_job(asked.kind, asked.slots, asked.on_client_loss, asked.lease_ttl_s, asked.labels)
        full = admission.trains_all_weights(asked.slots)
        offer = self._offer.on(self._nodes())
        completed: list[SlotSpec] = []
        for index, spec in enumerate(asked.slots):
            field = f"job.slots[{index}]"
            model = await self._models.resolve(spec.base_model, f"{field}.base_model")
            completed.append(admission.complete(spec, model, offer, field, full=full))
        admission.check_capacity(completed, offer.limits)
        return replace(asked, slots=tuple(completed))

    def create(self, tx: Transaction, new: NewJob, project: str) -> Job:
        """Queue an admitted job."""
        if new.run:
            self._check_run(tx, new.run, project)
        if not self._offer.limits.can_launch:
            admission.check_offered(new.slots, tx.servers.live())
        cost = cost_of(new.slots, self._offer.limits.per_server)
        quotas = self._tenants.of(project)
        admission.check_quota(project, cost, new.priority, tx.jobs.count(project), quotas)
        now = self._clock.now()
        job = Job(
            id=new_id(),
            project=project,
            kind=new.kind,
            slots=new.slots,
            state=JobState.QUEUED,
            create_time=now,
            queue_time=now,
            display_name=new.display_name,
            state_reason="queued",
            on_client_loss=new.on_client_loss,
            lease_ttl_s=new.lease_ttl_s,
            labels=new.labels,
            run=new.run,
            cost_slots=cost.slots,
            cost_gpus=cost.gpus,
            priority=new.priority,
            max_duration_s=new.max_duration_s,
            idle_limit_s=new.idle_limit_s,
        )
        # Who creates a job has asked about it: a tick may come before its first renewal.
        self._leases.attend(job.id)
        return add_job(tx, job, now)

    def finish(self, tx: Transaction, name: str, outcome: JobState, message: str, scope: str | None) -> Job:
        check_text(message, MAX_MESSAGE, "message")
        job = job_of(tx, name, scope)
        now = self._clock.now()
        return save_job(tx, job, rules.finished(job, outcome, message, now), now)

    def cancel(self, tx: Transaction, name: str, scope: str | None) -> Job:
        job = job_of(tx, name, scope)
        now = self._clock.now()
        return save_job(tx, job, rules.cancelled(job, "cancelled by CancelJob", now), now)

    def pause(self, tx: Transaction, name: str, scope: str | None) -> Job:
        job = job_of(tx, name, scope)
        return save_job(tx, job, rules.paused(job, "paused by PauseJob"), self._clock.now())

    def resume(self, tx: Transaction, name: str, scope: str | None) -> Job:
        job = job_of(tx, name, scope)
        now = self._clock.now()
        return save_job(tx, job, rules.resumed(job, now), now)

    def renewable(self, tx: Transaction, name: str, scope: str | None) -> RenewedLease:
        """A job that can be kept alive. INVALID_STATE for one that ended or is paused."""
        job = job_of(tx, name, scope)
        if job.state.final or job.state is JobState.PAUSED:
            way_out = "ResumeJob queues it again" if job.state is JobState.PAUSED else "create a new one"
            text = f"{name} is {job.state.upper()}, so it has no lease to renew; {way_out}"
            raise ServiceError(Reason.INVALID_STATE, text, metadata={"state": job.state.upper()})
        return RenewedLease(job, self.endpoints(tx, job))

    def heard(self, job: Job) -> bool:
        """A job's client created, resumed or renewed it: it gets a lease. Whether it was not heard before."""
        self._leases.grant_job(job)
        return self._leases.attend(job.id)

    def attend(self, job: Job) -> bool:
        """A client asked about a job; whether it was not heard before."""
        return not job.state.final and self._leases.attend(job.id)

    def token_of(self, job: Job) -> str:
        """The token to send to trainer, inference and env_host."""
        return self._tokens.issue(job)

    def sampling_token_of(self, job: Job) -> str:
        """A token that inference servers take and no others: for who samples what another serves."""
        return self._tokens.issue(job, audience=(INFERENCE,))

    def endpoints(self, tx: Transaction, job: Job) -> tuple[JobEndpoint, ...]:
        """Where a job's slots are served; none unless it runs."""
        if job.state is not JobState.RUNNING:
            return ()
        found: list[JobEndpoint] = []
        for assignment in tx.assignments.of_job(job.id):
            server = tx.servers.find(assignment.server_id)
            if server is None or assignment.state is not AssignmentState.READY:
                continue
            found.append(
                JobEndpoint(
                    role=assignment.role,
                    server=server.name,
                    address=server.address,
                    attempt=assignment.attempt,
                    base_model=server.base_model,
                    slot_index=assignment.slot_index,
                )
            )
        return tuple(found)

    def _check_run(self, tx: Transaction, name: str, project: str) -> None:
        (run_id,) = require(name, Reason.INVALID_FIELD, "run", "runs")
        run = tx.runs.find(run_id)
        if run is None or run.project != project:
            raise ServiceError(Reason.INVALID_FIELD, f"there is no run {name}", field="job.run")
