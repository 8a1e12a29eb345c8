"""What outlives the processes that made it: policies, versions, checkpoints, runs and their parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from opentinker_scheduler.domain.model import JobState, SlotSpec, Tuning


@dataclass(frozen=True, slots=True)
class Policy:
    """A model being trained."""

    id: str
    project: str
    job_id: str
    """Empty for a policy that no job holds."""
    base_model: str
    base_digest: str
    tuning: Tuning
    rank: int
    alpha: float | None
    target_modules: tuple[str, ...]
    seed: int
    display_name: str
    latest_version: int
    create_time: datetime
    seq: int = 0
    value_head: bool = False
    activation_checkpointing: bool = False

    @property
    def name(self) -> str:
        return f"policies/{self.id}"


@dataclass(frozen=True, slots=True)
class Version:
    """One set of published weights; 0 is the policy as it was made."""

    policy_id: str
    version: int
    sha256: str
    manifest_key: str
    step: int
    create_time: datetime
    gone: bool = False
    """Its weights were deleted; its number stays taken."""

    @property
    def name(self) -> str:
        return f"policies/{self.policy_id}/versions/{self.version}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to resume a policy."""

    id: str
    policy_id: str
    sha256: str
    manifest_key: str
    step: int
    version: int
    size_bytes: int
    display_name: str
    create_time: datetime
    seq: int = 0
    expire_time: datetime | None = None
    """When it may be deleted for its age."""

    @property
    def name(self) -> str:
        return f"policies/{self.policy_id}/checkpoints/{self.id}"


@dataclass(frozen=True, slots=True)
class Target:
    """Weights that can be served: a policy's version or checkpoint, or a base model."""

    model: str
    """Its name: `policies/P/versions/N`, `policies/P/checkpoints/C` or `models/BASE`."""
    base_model: str
    policy: Policy | None = None
    version: int | None = None
    """Set for a version."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model served under a name of the user's choice, by a job that needs no client."""

    id: str
    project: str
    model: str
    slot: SlotSpec
    """What its job asks for, everything filled in."""
    job_id: str
    create_time: datetime
    update_time: datetime
    history: tuple[str, ...] = ()
    """What it served before, the last first."""
    seq: int = 0

    @property
    def name(self) -> str:
        return f"deployments/{self.id}"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Where a job stood from some time on."""

    seq: int
    time: datetime
    state: JobState
    reason: str
    attempt: int


class RunState(StrEnum):
    """Where a run stands."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Run:
    """The record of one fit() or sft()."""

    id: str
    project: str
    display_name: str
    job: str
    config_json: str
    state: RunState
    step: int
    create_time: datetime
    update_time: datetime
    seq: int = 0

    @property
    def name(self) -> str:
        return f"runs/{self.id}"


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one step."""

    step: int
    values: Mapping[str, float]
    time: datetime


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes in the object store, by hash."""

    sha256: str
    size_bytes: int = 0
    uri: str = ""


@dataclass(frozen=True, slots=True)
class LoopState:
    """What a loop needs to go on beside its trainer checkpoint; inline or in a blob."""

    step: int
    checkpoint: str
    state: bytes
    blob: Blob | None


@dataclass(frozen=True, slots=True)
class Groups:
    """The finished groups of one step."""

    step: int
    blob: Blob
    groups: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A named blob of a run."""

    name: str
    blob: Blob
    media_type: str


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened, to be announced after the transaction that recorded it."""

    kind: str
    """job, server_registered, server_lost, weights_published, checkpoint_saved or metrics_step."""
    subject: str
    """The resource's name."""
    id: str = ""
    """Set where the same fact may be recorded twice and must be announced once."""
    detail: Mapping[str, str | int] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
