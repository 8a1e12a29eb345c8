"""What the scheduler needs from outside, as Protocols; the adapters live in `adapters/`.

Repositories are used inside a transaction, in the one thread that owns the database; nothing here is awaited.
`Database` is how the event loop reaches them, `Launcher` how processes are started, `ModelSource` how a base
model's name is checked.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from opentinker_kit.events import OutboxRow
from opentinker_scheduler.account_ports import AccountRepository, AuditRepository
from opentinker_scheduler.domain.admission import Model
from opentinker_scheduler.domain.model import Assignment, Job, JobKind, JobState, Server
from opentinker_scheduler.domain.records import (
    Artifact,
    Blob,
    Checkpoint,
    Deployment,
    Fact,
    Groups,
    LoopState,
    MetricsRow,
    Policy,
    Run,
    Version,
)
from opentinker_scheduler.log_ports import HistoryRepository
from opentinker_scheduler.usage_ports import UsageRepository

T = TypeVar("T")


class JobRepository(Protocol):
    """Jobs."""

    def add(self, job: Job) -> Job:
        """Record a new job; returned with its `seq`."""
        ...

    def find(self, job_id: str) -> Job | None: ...

    def save(self, job: Job) -> Job:
        """Write a changed job; returned with its new revision. KeyError if there is none."""
        ...

    def tell(self, job_id: str, position: int, reason: str, start: datetime | None = None) -> None:
        """Say what a waiting job waits for, and until when if that is known, until it is saved. This is not
        kept over restarts: it is found anew many times a second."""
        ...

    def held(self, number: int) -> Sequence[tuple[JobKind, float]]:
        """How long the newest so many jobs held slots that have ended, with their kind."""
        ...

    def live(self) -> Sequence[Job]:
        """Jobs that are not final, those queued earliest first."""
        ...

    def unsorted(self) -> Sequence[Job]:
        """Those, in no order, which takes less time."""
        ...

    def count(self, project: str) -> int:
        """How many jobs of a project are not final."""
        ...

    def page(
        self,
        before: int | None,
        size: int,
        states: Collection[JobState],
        project: str | None = None,
    ) -> Sequence[Job]:
        """Newest first, with `seq` below `before`; all states, and all projects, where none are named."""
        ...


class ServerRepository(Protocol):
    """Servers. Two that have not ended can never have one GPU: `DeviceTaken`."""

    def add(self, server: Server) -> Server: ...

    def find(self, server_id: str) -> Server | None: ...

    def find_instance(self, instance_id: str) -> Server | None:
        """The server of this process start, the newest if there were several."""
        ...

    def save(self, server: Server) -> None:
        """Write a changed server. KeyError if there is none."""
        ...

    def live(self) -> Sequence[Server]:
        """Servers that have not ended, oldest first."""
        ...

    def page(self, before: int | None, size: int, include_ended: bool) -> Sequence[Server]: ...


class AssignmentRepository(Protocol):
    """Slots given to jobs. Two assignments that have not ended can never have one slot: `SlotTaken`."""

    def add(self, assignment: Assignment) -> None: ...

    def find(self, assignment_id: str) -> Assignment | None: ...

    def save(self, assignment: Assignment) -> None: ...

    def active(self) -> Sequence[Assignment]:
        """All that have not ended."""
        ...

    def of_job(self, job_id: str) -> Sequence[Assignment]:
        """Those of a job that have not ended, in the order of its slots."""
        ...

    def of_server(self, server_id: str) -> Sequence[Assignment]:
        """Those of a server that have not ended."""
        ...

    def servers_of(self, job_id: str) -> Sequence[str]:
        """Ids of all servers that ever gave a job a slot, the first one first."""
        ...


class SlotTaken(Exception):
    """The database refused a second owner of a slot."""


class DeviceTaken(Exception):
    """The database refused a second owner of a GPU."""


class CatalogRepository(Protocol):
    """Policies, versions, checkpoints."""

    def add_policy(self, policy: Policy) -> Policy: ...

    def find_policy(self, policy_id: str) -> Policy | None: ...

    def page_policies(
        self, before: int | None, size: int, job_id: str, project: str | None = None
    ) -> Sequence[Policy]: ...

    def policy_names(self, job_id: str) -> Sequence[str]:
        """Names of a job's policies, oldest first."""
        ...

    def delete_policy(self, policy_id: str) -> None:
        """With its versions and checkpoints."""
        ...

    def add_version(self, version: Version) -> None:
        """Record a version and raise the policy's `latest_version` to it."""
        ...

    def find_version(self, policy_id: str, version: int) -> Version | None: ...

    def page_versions(self, policy_id: str, before: int | None, size: int) -> Sequence[Version]: ...

    def older_versions(self, policy_id: str, count: int, limit: int) -> Sequence[Version]:
        """Those of a policy behind its newest `count`; version 0 and those that are gone left out."""
        ...

    def mark_gone(self, version: Version) -> None:
        """The version's weights are deleted; its number stays taken."""
        ...

    def add_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint: ...

    def find_checkpoint(self, policy_id: str, checkpoint_id: str) -> Checkpoint | None: ...

    def page_checkpoints(self, policy_id: str, before: int | None, size: int) -> Sequence[Checkpoint]: ...

    def delete_checkpoint(self, policy_id: str, checkpoint_id: str) -> None: ...

    def expired_checkpoints(self, now: datetime, limit: int) -> Sequence[Checkpoint]:
        """Those whose time is over and that are not the newest of their policy."""
        ...

    def older_checkpoints(self, policy_id: str, count: int, limit: int) -> Sequence[Checkpoint]:
        """Those of a policy behind its newest `count`, by id."""
        ...

    def is_discarded(self, prefix: str) -> bool:
        """Whether objects under a prefix wait to be deleted."""
        ...

    def discard_objects(self, prefix: str, due: datetime) -> None:
        """Have everything under an object key prefix deleted once `due` has passed."""
        ...

    def discarded_objects(self, now: datetime, limit: int) -> Sequence[str]:
        """Prefixes that are due."""
        ...

    def forget_objects(self, prefix: str) -> None:
        """Everything under a prefix is deleted."""
        ...


class DeploymentRepository(Protocol):
    """Deployments; their ids are unique in a project."""

    def add(self, deployment: Deployment) -> Deployment: ...

    def find(self, project: str, deployment_id: str) -> Deployment | None: ...

    def save(self, deployment: Deployment) -> None:
        """Write a changed deployment. KeyError if there is none."""
        ...

    def delete(self, deployment: Deployment) -> None: ...

    def page(self, project: str, before: int | None, size: int) -> Sequence[Deployment]: ...

    def needing(self, model: str) -> str | None:
        """Name of a deployment that serves a model, or would when it is rolled back; for the name of a
        policy, any version or checkpoint of it."""
        ...


class RunRepository(Protocol):
    """Runs and what belongs to them."""

    def add(self, run: Run) -> Run: ...

    def find(self, run_id: str) -> Run | None: ...

    def save(self, run: Run) -> None: ...

    def page(self, before: int | None, size: int, project: str | None = None) -> Sequence[Run]: ...

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        """A row of a step that is there replaces it."""
        ...

    def page_metrics(self, run_id: str, after: int | None, size: int) -> Sequence[MetricsRow]: ...

    def put_loop_state(self, run_id: str, state: LoopState) -> None: ...

    def find_loop_state(self, run_id: str) -> LoopState | None: ...

    def run_from(self, checkpoint: str) -> str | None:
        """Name of a run whose loop state names a checkpoint."""
        ...

    def put_groups(self, run_id: str, groups: Groups) -> None: ...

    def page_groups(self, run_id: str, after: int | None, size: int) -> Sequence[Groups]: ...

    def put_artifact(self, run_id: str, artifact: Artifact) -> None: ...

    def page_artifacts(self, run_id: str, after: str | None, size: int) -> Sequence[Artifact]: ...


class BlobRepository(Protocol):
    """Uploads that were signed."""

    def put(self, blob: Blob, now: datetime) -> None: ...

    def find(self, sha256: str) -> Blob | None: ...


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What a request id was answered."""

    digest: str
    response: bytes


class RequestRepository(Protocol):
    """Answers by request id."""

    def find(self, scope: str, request_id: str) -> StoredAnswer | None: ...

    def add(self, scope: str, request_id: str, answer: StoredAnswer, now: datetime) -> None: ...

    def forget_before(self, time: datetime) -> int: ...


class OutboxRepository(Protocol):
    """Facts recorded with the change they tell of."""

    def add(self, fact: Fact, now: datetime) -> None: ...

    def pending(self, limit: int) -> Sequence[OutboxRow]: ...

    def delete(self, row_ids: Sequence[int]) -> None: ...


class Transaction(Protocol):
    """One transaction: all of it happens or none."""

    @property
    def jobs(self) -> JobRepository: ...
    @property
    def servers(self) -> ServerRepository: ...
    @property
    def assignments(self) -> AssignmentRepository: ...
    @property
    def history(self) -> HistoryRepository: ...
    @property
    def usage(self) -> UsageRepository: ...
    @property
    def catalog(self) -> CatalogRepository: ...
    @property
    def deployments(self) -> DeploymentRepository: ...
    @property
    def runs(self) -> RunRepository: ...
    @property
    def blobs(self) -> BlobRepository: ...
    @property
    def requests(self) -> RequestRepository: ...
    @property
    def outbox(self) -> OutboxRepository: ...
    @property
    def accounts(self) -> AccountRepository: ...
    @property
    def audit(self) -> AuditRepository: ...


class Database(Protocol):
    """Runs functions in transactions, in its own thread, one after the other."""

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """Do `work` in one transaction, rolled back if it raises. LeadershipLost if another took over,
        STORAGE_UNAVAILABLE where the database does not answer: what was asked for may have happened then.
        """
        ...


class ModelSource(Protocol):
    """Base models by name."""

    async def resolve(self, model_id: str, field: str) -> Model:
        """What a name stands for. UNKNOWN_MODEL, naming `field` and listing what is known."""
        ...

    async def known(self) -> Sequence[str]:
        """Models known by name."""
        ...
