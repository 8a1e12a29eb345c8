"""What of a model is trained, how a step is taken, what kind of servers do it, and how its job waits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from opentinker.errors import invalid
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.trainer.v1 import trainer_service_pb2


@dataclass(frozen=True, slots=True)
class LoRA:
    """Low-rank adapters over a frozen base; the scale is alpha / rank."""

    rank: int = 16
    alpha: float = 32.0
    target_modules: Sequence[str] = ()
    """Names of linear layers, "lm_head" (the unembedding) included. Default: all attention and MLP
    projections.
    """
    value_head: bool = False
    """Train a linear map from the last hidden state to one number beside, for value losses."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise invalid("rank", f"must be at least 1, not {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise invalid("alpha", f"must be a positive finite number, not {self.alpha}")

    def to_wire(self) -> policy_pb2.Tuning:
        """As a message."""
        lora = policy_pb2.LoraTuning(rank=self.rank, alpha=self.alpha, target_modules=self.target_modules)
        return policy_pb2.Tuning(
            lora=lora,
            value_head=self.value_head,
            activation_checkpointing=self.activation_checkpointing,
        )


@dataclass(frozen=True, slots=True)
class Full:
    """Every weight is trained; the optimizer's state is float32. Its job does not share its servers."""

    value_head: bool = False
    """As of LoRA."""
    activation_checkpointing: bool = False
    """As of LoRA."""

    def to_wire(self) -> policy_pb2.Tuning:
        """As a message."""
        return policy_pb2.Tuning(
            full=policy_pb2.FullTuning(),
            value_head=self.value_head,
            activation_checkpointing=self.activation_checkpointing,
        )


Tuning = LoRA | Full


@dataclass(frozen=True, slots=True)
class AdamW:
    """The optimizer with its hyperparameters for one step. `clip_norm` bounds the global gradient norm."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise invalid(name, f"must be a finite number of at least 0, not {value}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise invalid(name, f"must be in [0, 1), not {value}")
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise invalid("eps", f"must be a positive finite number, not {self.eps}")
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise invalid("clip_norm", f"must be a positive finite number, not {self.clip_norm}")

    def to_wire(self) -> trainer_service_pb2.AdamW:
        """As a message; `clip_norm` is a field of the step itself."""
        return trainer_service_pb2.AdamW(
            learning_rate=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What kind of server a job wants behind a slot. None: the cluster's default."""

    engine: str | None = None
    """Trainer: "torch" or "noop". Inference: "vllm", "transformers" or "noop"."""
    dtype: str | None = None
    """ "float32" or "bfloat16"."""
    serving_mode: str | None = None
    """Inference: "adapter" or "merged"."""
    max_lora_rank: int | None = None
    context_tokens: int | None = None
    """Longest sequence."""
    exclusive: bool = False
    """Not shared with other jobs."""
    ranks: int | None = None
    """Trainer: processes that a policy is spread over."""
    accelerator: str | None = None
    """Type of the GPUs that it runs on, as in "H100"."""
    replicas: int = 1
    """Inference: servers that sample for the policy, each with the model. Requests go where there is room,
    the turns of an episode to one of them, and those of one that dies to the others.
    """

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise invalid("replicas", f"must be at least 1, not {self.replicas}")

    def to_wire(self) -> job_pb2.ServerOptions:
        """As a message."""
        return job_pb2.ServerOptions(
            engine=self.engine or "",
            dtype=self.dtype or "",
            serving_mode=self.serving_mode or "",
            max_lora_rank=self.max_lora_rank or 0,
            context_tokens=self.context_tokens or 0,
            exclusive=self.exclusive,
            ranks=self.ranks or 0,
            accelerator=self.accelerator or "",
        )


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job waits for its servers, and for how long it may keep them."""

    priority: int = 0
    """Jobs with more go first, of all projects. How much a project may ask for is up to the cluster."""
    max_duration: timedelta | None = None
    """Longest time that the job may hold servers; then it fails with reason TIME_LIMIT. Jobs that say how
    long they take may start in slots that are kept for larger ones. None: the cluster's default.
    """
    idle_limit: timedelta | None = None
    """Longest time without metrics, a checkpoint or a published version; then it fails with IDLE_LIMIT."""

    def __post_init__(self) -> None:
        for name in ("max_duration", "idle_limit"):
            value = getattr(self, name)
            if value is not None and value <= timedelta():
                raise invalid(name, f"must be longer than nothing, not {value}")

    def apply(self, job: job_pb2.Job) -> None:
        """Write it into a message."""
        job.priority = self.priority
        if self.max_duration is not None:
            job.max_duration.FromTimedelta(self.max_duration)
        # A job that only samples makes no progress that the scheduler could see.
        if self.idle_limit is not None and job.kind != job_pb2.JOB_KIND_INFERENCE:
            job.idle_limit.FromTimedelta(self.idle_limit)
