"""The losses that a request can ask for, as typed values.

A component is summed over its loss tokens; its denominator is given with the request or deferred to the
optimizer step. Nothing is averaged anywhere else. `weights` of a sample multiply its tokens' losses in every
component. A sequence is a sample: its loss tokens, wherever they lie in it.

In the formulas r = exp(logprob - base logprob), where the base is the proximal policy if samples have its
logprobs, otherwise the one that sampled (behavior); A is the token's advantage.
"""

from dataclasses import dataclass
from enum import Enum

from opentinker_trainer.domain.registered import RegisteredLoss, registered_names


class KlEstimator(Enum):
    """Estimates a divergence from d = logprob - other logprob at a sampled token."""

    K1 = "k1"
    """d"""
    K2 = "k2"
    """d^2 / 2"""
    K3 = "k3"
    """exp(-d) - 1 + d"""
    K3_STRAIGHT_THROUGH = "k3_straight_through"
    """The value of K3 with the gradient of K2."""


class CorrectionKind(Enum):
    """What becomes of w = exp(proximal logprob - behavior logprob)."""

    TOKEN_TRUNCATE = "token_truncate"
    """min(w, high)"""
    TOKEN_MASK = "token_mask"
    """w where it lies in [low, high], 0 elsewhere."""
    SEQUENCE_TRUNCATE = "sequence_truncate"
    """min(product of w over the sequence, high), for all its tokens."""
    SEQUENCE_MASK = "sequence_mask"
    """The product of w over the sequence where it lies in [low, high], 0 elsewhere."""
    GEOMETRIC_MASK = "geometric_mask"
    """The token's w, at most token_high, where the sequence's geometric mean lies in [low, high], else 0."""
    NONE = "none"
    """w itself."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A detached factor of a policy loss. None is no bound."""

    kind: CorrectionKind
    low: float | None = None
    high: float | None = None
    token_high: float | None = None


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """-r A."""


@dataclass(frozen=True, slots=True)
class Ppo:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 at most -dual_clip A."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True)
class Gspo:
    """PPO's surrogate of the sequence's ratio exp(mean log r)."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4


@dataclass(frozen=True, slots=True)
class Cispo:
    """-sg(clamp(r, ratio_min, ratio_max)) A logprob."""

    ratio_min: float = 0.8
    ratio_max: float = 1.28


@dataclass(frozen=True, slots=True)
class Sapo:
    """-sigmoid(tau (r - 1)) 4 / tau A."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True, slots=True)
class Gmpo:
    """-A times the geometric mean over the sequence of r, clipped in log space to [-clip_low, clip_high]."""

    clip_low: float = 0.4
    clip_high: float = 0.4


@dataclass(frozen=True, slots=True)
class DppoTv:
    """-sg(min(r, ratio_max)) A logprob where the probability has moved along A by no more than delta."""

    delta_low: float = 0.15
    delta_high: float = 0.15
    ratio_max: float = 20.0


@dataclass(frozen=True, slots=True)
class Dro:
    """-logprob A + beta / 2 (logprob - base logprob)^2."""

    beta: float = 0.1


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-logprob."""


@dataclass(frozen=True, slots=True)
class Kl:
    """An estimate of KL(policy || reference)."""

    estimator: KlEstimator = KlEstimator.K3
    importance_weighted: bool = False
    """Multiply by exp(logprob - behavior logprob)."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """An estimate of KL(policy || teacher)."""

    estimator: KlEstimator = KlEstimator.K3_STRAIGHT_THROUGH
    importance_weighted: bool = False


@dataclass(frozen=True, slots=True)
class Entropy:
    """The negative entropy of the policy."""


@dataclass(frozen=True, slots=True)
class Value:
    """(v - R)^2 / 2; with a clip no less than that of v kept within clip of what it was."""

    clip: float | None = None


PolicyLoss = ImportanceSampling | Ppo | Gspo | Cispo | Sapo | Gmpo | DppoTv | Dro
OtherLoss = CrossEntropy | Kl | Distillation | Entropy | Value
Loss = PolicyLoss | OtherLoss | RegisteredLoss

TYPED_NAMES = (
    "importance_sampling",
    "ppo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dro",
    "cross_entropy",
    "kl",
    "distillation",
    "entropy",
    "value",
)
"""The fields of LossComponent.loss."""

LOSS_NAMES = (*TYPED_NAMES, *registered_names())
"""The losses of this server, as GetCapabilities lists them: typed ones, then registered ones."""


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the objective: coefficient * sum(weight * loss over tokens) / denominator."""

    name: str
    loss: Loss
    denominator: float | None
    """None: deferred, OptimStep carries it."""
    coefficient: float = 1.0
    correction: Correction | None = None

    @property
    def is_policy(self) -> bool:
        """Whether it moves the policy along advantages."""
        return isinstance(self.loss, PolicyLoss | RegisteredLoss)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the arrays that samples must carry."""
        match self.loss:
            case Kl(importance_weighted=weighted):
                return ("reference_logprobs", *_BEHAVIOR[: int(weighted)])
            case Distillation(importance_weighted=weighted):
                return ("teacher_logprobs", *_BEHAVIOR[: int(weighted)])
            case Value(clip=clip):
                return ("returns",) if clip is None else ("returns", "old_values")
            case CrossEntropy() | Entropy():
                return ()
            case _:
                proximal = () if self.correction is None else ("proximal_logprobs",)
                return (*_BEHAVIOR, "advantages", *proximal)

    @property
    def needs_values(self) -> bool:
        """Whether the policy must have a value head."""
        return isinstance(self.loss, Value)

    @property
    def silent_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 has no gradient."""
        if isinstance(self.loss, Dro):
            return self.loss.beta == 0
        if isinstance(self.loss, RegisteredLoss):
            return self.loss.silent_without_advantage
        return self.is_policy

    @property
    def factor(self) -> float:
        """What the sum is multiplied by when its gradient is accumulated."""
        return self.coefficient / (self.denominator if self.denominator is not None else 1.0)


_BEHAVIOR = ("behavior_logprobs",)
