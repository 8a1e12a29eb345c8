"""What the scheduler knows: jobs, servers, assignments. Plain values; changing one makes a new one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

ENGINES: Mapping["Role", tuple[str, ...]]
"""Engines that a server of a role can be started with."""
DTYPES = ("float32", "bfloat16")
SERVING_MODES = ("adapter", "merged")


class Role(StrEnum):
    """What a slot does."""

    TRAINER = "trainer"
    INFERENCE = "inference"


ENGINES = {Role.TRAINER: ("torch", "noop"), Role.INFERENCE: ("vllm", "transformers", "noop")}


class JobKind(StrEnum):
    """What a job is for."""

    LORA_RL = "lora_rl"
    INFERENCE = "inference"
    FULL_RL = "full_rl"
    SFT = "sft"


class Tuning(StrEnum):
    """Which weights a slot trains."""

    NONE = ""
    LORA = "lora"
    FULL = "full"


class OnClientLoss(StrEnum):
    """What happens when nobody renews a job's lease."""

    PAUSE = "pause"
    CANCEL = "cancel"
    DETACH = "detach"


class JobState(StrEnum):
    """Where a job stands; `jobs.SUCCESSORS` has the legal steps."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    PREEMPTED = "preempted"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def placed(self) -> bool:
        """Whether a job in this state holds slots, or waits to get lost ones back."""
        return self in (JobState.STARTING, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server behind a slot. Empty and 0 mean: whatever the server was started with."""

    engine: str = ""
    dtype: str = ""
    serving_mode: str = ""
    max_lora_rank: int = 0
    context_tokens: int = 0
    ranks: int = 0
    """Processes that a policy is spread over; for trainers."""
    accelerator: str = ""
    """Type of the GPUs of the node that it is on."""

    def accepts(self, asked: "ServerOptions") -> bool:
        """Whether a server that registered itself with these options serves a slot that asks for those."""
        return (
            asked.engine in ("", self.engine)
            and asked.dtype in ("", self.dtype)
            and asked.serving_mode in ("", self.serving_mode)
            and (self.max_lora_rank == 0 or asked.max_lora_rank <= self.max_lora_rank)
            and (self.context_tokens == 0 or asked.context_tokens <= self.context_tokens)
            and asked.ranks in (0, max(1, self.ranks))
            and asked.accelerator in ("", self.accelerator)
        )


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """Some slots of one kind that a job asks for."""

    role: Role
    base_model: str
    tuning: Tuning = Tuning.NONE
    count: int = 1
    options: ServerOptions = ServerOptions()
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What a job keeps from others."""

    slots: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.slots + other.slots, self.gpus + other.gpus)

    def share_of(self, total: "Cost") -> float:
        """The larger of the two parts of a whole."""
        return max(
            self.slots / total.slots if total.slots > 0 else 0.0,
            self.gpus / total.gpus if total.gpus > 0 else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something ended badly: a reason of the catalogue (none where a driver said so), words, details."""

    reason: str
    message: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A lease on capacity and its record."""

    id: str
    project: str
    kind: JobKind
    slots: tuple[SlotSpec, ...]
    state: JobState
    create_time: datetime
    queue_time: datetime
    display_name: str = ""
    state_reason: str = ""
    queue_position: int = 0
    estimated_start_time: datetime | None = None
    """When a waiting one is expected to start, where that can be said; like the position not kept."""
    attempt: int = 0
    error: Failure | None = None
    on_client_loss: OnClientLoss = OnClientLoss.PAUSE
    lease_ttl_s: float = 600.0
    start_time: datetime | None = None
    end_time: datetime | None = None
    outcome_message: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    crashes: tuple[datetime, ...] = ()
    """Times of server crashes since the job last made progress."""
    cost_slots: float = 1.0
    """What it keeps from others while it holds slots, as admission counts it."""
    cost_gpus: float = 0.0
    priority: int = 0
    max_duration_s: float = 0.0
    """How long it may hold slots; 0: for ever."""
    idle_limit_s: float = 0.0
    """How long it may run without progress; 0: for ever."""
    held_s: float = 0.0
    """How long it held slots before `grant_time`."""
    grant_time: datetime | None = None
    """Since when it holds slots, or has a claim on those that it lost."""
    progress_time: datetime | None = None
    """When it began to run, or made progress since; noted for jobs with an idle limit."""
    seq: int = 0
    """Order of creation; given by the store."""
    revision: int = 0
    """Grows with each write."""

    @property
    def name(self) -> str:
        return f"jobs/{self.id}"

    @property
    def cost(self) -> Cost:
        return Cost(self.cost_slots, self.cost_gpus)

    def held_until(self, now: datetime) -> float:
        """Seconds that it has held slots by now."""
        return self.held_s + (0.0 if self.grant_time is None else (now - self.grant_time).total_seconds())


class ServerState(StrEnum):
    """Where a server stands: LAUNCHING -> REGISTERED -> READY -> DRAINING -> STOPPED | LOST."""

    LAUNCHING = "launching"
    REGISTERED = "registered"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in (ServerState.STOPPED, ServerState.LOST)


@dataclass(frozen=True, slots=True)
class Server:
    """A trainer or inference process: launched by us, or one that registered itself."""

    id: str
    role: Role
    base_model: str
    options: ServerOptions
    state: ServerState
    slots_total: int
    launcher: str
    start_time: datetime
    base_digest: str = ""
    reported: ServerOptions = ServerOptions()
    """The options as the running server says they are."""
    address: str = ""
    attempt: int = 0
    instance_id: str = ""
    own_id: str = ""
    """The id that a server which registered itself calls itself by, over restarts."""
    pid: int = 0
    pid_start: float = 0.0
    """When the process began, seconds since the epoch: with `pid` it names one process for good."""
    log_path: str = ""
    register_time: datetime | None = None
    end_time: datetime | None = None
    end_reason: str = ""
    exit_code: int | None = None
    devices: tuple[str, ...] = ()
    """GPUs that it has until it has ended, rank by rank: node and number."""
    seq: int = 0

    @property
    def name(self) -> str:
        return f"servers/{self.id}"

    @property
    def launched(self) -> bool:
        """Whether we started it, so that we may also stop it."""
        return self.launcher != STATIC


STATIC = "static"
"""Launcher of the servers that register themselves."""


class AssignmentState(StrEnum):
    """How far a slot given to a job is: GRANTED -> READY -> RELEASING -> ENDED."""

    GRANTED = "granted"
    READY = "ready"
    RELEASING = "releasing"
    ENDED = "ended"

    @property
    def held(self) -> bool:
        """Whether the job still owns the slot."""
        return self in (AssignmentState.GRANTED, AssignmentState.READY)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One slot of one server, owned by one job under one attempt."""

    id: str
    job_id: str
    server_id: str
    slot_no: int
    slot_index: int
    """Which of the job's slot specs it answers."""
    ordinal: int
    """Which of that spec's `count`."""
    role: Role
    attempt: int
    exclusive: bool
    state: AssignmentState
    create_time: datetime
    change_time: datetime
    message: str = ""
