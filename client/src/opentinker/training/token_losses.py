"""Losses beside the policy's: supervised, distillation, KL and entropy terms, the value head's, registered
ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from opentinker.errors import invalid
from opentinker.training.limits import above
from opentinkerapi.data.v1 import loss_pb2

Estimator = Literal["k1", "k2", "k3", "k3_straight_through"]
"""Of a divergence from d = logprob - other logprob at a sampled token: d, d^2 / 2, exp(-d) - 1 + d, and the
value of k3 with the gradient of k2.
"""

_ESTIMATORS: "Mapping[str, loss_pb2.KlEstimator.ValueType]" = {
    "k1": loss_pb2.KL_ESTIMATOR_K1,
    "k2": loss_pb2.KL_ESTIMATOR_K2,
    "k3": loss_pb2.KL_ESTIMATOR_K3,
    "k3_straight_through": loss_pb2.KL_ESTIMATOR_K3_STRAIGHT_THROUGH,
}


def check_estimator(estimator: str) -> None:
    """InvalidArgument unless it is one of the four."""
    if estimator not in get_args(Estimator):
        raise invalid("estimator", f"must be one of {', '.join(get_args(Estimator))}, not {estimator!r}")


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-w logprob per token; the weights w of the samples have any sign, default 1."""

    component: ClassVar[str] = "supervised"
    needs: ClassVar[tuple[str, ...]] = ()

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.cross_entropy.SetInParent()


@dataclass(frozen=True, slots=True)
class KL:
    """An estimate of KL(policy || reference) at the tokens of samples with `reference_logprobs`.

    `importance_weighted` multiplies it by exp(logprob - behavior logprob): unbiased off policy.
    """

    estimator: Estimator = "k3"
    importance_weighted: bool = False

    component: ClassVar[str] = "kl"

    def __post_init__(self) -> None:
        check_estimator(self.estimator)

    @property
    def needs(self) -> tuple[str, ...]:
        """The per-token arrays that samples must carry."""
        return ("reference_logprobs", *(("logprobs",) if self.importance_weighted else ()))

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.kl.estimator = _ESTIMATORS[self.estimator]
        wire.kl.importance_weighted = self.importance_weighted


@dataclass(frozen=True, slots=True)
class Entropy:
    """The policy's negative entropy per token: a positive coefficient is an entropy bonus."""

    component: ClassVar[str] = "entropy"
    needs: ClassVar[tuple[str, ...]] = ()

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.entropy.SetInParent()


@dataclass(frozen=True, slots=True)
class Value:
    """(v - return)^2 / 2 per token; `clip` takes the worse of v and of v kept within clip of `old_values`."""

    clip: float | None = None

    component: ClassVar[str] = "value"

    def __post_init__(self) -> None:
        if self.clip is not None:
            above("clip", self.clip, 0.0)

    @property
    def needs(self) -> tuple[str, ...]:
        """The per-token arrays that samples must carry."""
        return ("returns", *(("old_values",) if self.clip is not None else ()))

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.value.SetInParent()
        if self.clip is not None:
            wire.value.clip = self.clip


@dataclass(frozen=True, slots=True)
class Distillation:
    """An estimate of KL(policy || teacher) at the tokens of samples with `teacher_logprobs`."""

    estimator: Estimator = "k3_straight_through"
    importance_weighted: bool = False

    component: ClassVar[str] = "distillation"

    def __post_init__(self) -> None:
        check_estimator(self.estimator)

    @property
    def needs(self) -> tuple[str, ...]:
        """The per-token arrays that samples must carry."""
        return ("teacher_logprobs", *(("logprobs",) if self.importance_weighted else ()))

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.distillation.estimator = _ESTIMATORS[self.estimator]
        wire.distillation.importance_weighted = self.importance_weighted


@dataclass(frozen=True, slots=True)
class Registered:
    """A loss that the trainer knows by name; GetCapabilities lists them. `needs` is the server's to check."""

    loss: str
    options: Mapping[str, float] = field(default_factory=dict)

    needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if not self.loss:
            raise invalid("loss", "a registered loss needs its name")

    @property
    def component(self) -> str:
        """Its name in metrics and denominators, unless a mapping gives another."""
        return self.loss

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.registered.loss = self.loss
        for name, value in self.options.items():
            wire.registered.options[name] = float(value)


TokenLoss = CrossEntropy | KL | Entropy | Value | Distillation | Registered
