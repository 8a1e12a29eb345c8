"""Policy losses: what moves a policy towards actions with positive advantages A.

r = exp(logprob - proximal logprob), per token; where a sample has no proximal logprobs, the sampler's
(behavior) logprobs stand for them. `correction` weights each token by how far the sampler was from the
proximal policy. The trainer sums; the caller supplies the denominator.
"""

from dataclasses import dataclass
from typing import ClassVar

from opentinker.errors import invalid
from opentinker.training.corrections import Correction, to_wire
from opentinker.training.limits import above, at_least, ordered, within
from opentinkerapi.data.v1 import loss_pb2


class _PolicyLoss:
    """What policy losses have in common."""

    __slots__ = ()

    component: ClassVar[str] = "policy"
    correction: Correction | None

    @property
    def needs(self) -> tuple[str, ...]:
        """The per-token arrays that samples must carry."""
        return ("logprobs", "advantages", *(("proximal_logprobs",) if self.correction is not None else ()))

    def _check(self) -> None:
        if self.correction is not None and not isinstance(self.correction, Correction):
            raise invalid(
                "correction",
                f"{self.correction!r} is none of TIS(), IcePop(), SequenceTruncate(), SequenceMask(), "
                "GeometricMask() and Decoupled()",
            )

    def _correct(self, wire: loss_pb2.LossComponent) -> None:
        if self.correction is not None:
            wire.correction.CopyFrom(to_wire(self.correction))


@dataclass(frozen=True, slots=True)
class ImportanceSampling(_PolicyLoss):
    """-r A."""

    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.importance_sampling.SetInParent()
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class PPO(_PolicyLoss):
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); `dual_clip` bounds it where A < 0."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        within("clip_low", self.clip_low, 0.0, 1.0)
        at_least("clip_high", self.clip_high, 0.0)
        if self.dual_clip is not None:
            above("dual_clip", self.dual_clip, 1.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.ppo.clip_low = self.clip_low
        wire.ppo.clip_high = self.clip_high
        if self.dual_clip is not None:
            wire.ppo.dual_clip = self.dual_clip
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class GSPO(_PolicyLoss):
    """PPO's surrogate with one ratio a sequence: exp(mean of its log ratios)."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        within("clip_low", self.clip_low, 0.0, 1.0)
        at_least("clip_high", self.clip_high, 0.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.gspo.clip_low = self.clip_low
        wire.gspo.clip_high = self.clip_high
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class CISPO(_PolicyLoss):
    """-clamp(r, ratio_min, ratio_max) A logprob, the clamped ratio without gradient.

    Some libraries call the upper bound `epsilon_high` and mean the ratio itself, others its distance from 1;
    here both bounds are ratios.
    """

    ratio_min: float = 0.8
    ratio_max: float = 1.28
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        ordered("ratio_min", self.ratio_min, "ratio_max", self.ratio_max)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.cispo.ratio_min = self.ratio_min
        wire.cispo.ratio_max = self.ratio_max
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class SAPO(_PolicyLoss):
    """-sigmoid(tau (r - 1)) 4 / tau A: a soft gate, with one temperature for A > 0 and one for the rest."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        above("tau_positive", self.tau_positive, 0.0)
        above("tau_negative", self.tau_negative, 0.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.sapo.tau_positive = self.tau_positive
        wire.sapo.tau_negative = self.tau_negative
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class GMPO(_PolicyLoss):
    """-A times the geometric mean of a sequence's ratios, their logarithms clipped to
    [-clip_low, clip_high].
    """

    clip_low: float = 0.4
    clip_high: float = 0.4
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        at_least("clip_low", self.clip_low, 0.0)
        at_least("clip_high", self.clip_high, 0.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.gmpo.clip_low = self.clip_low
        wire.gmpo.clip_high = self.clip_high
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class DPPO(_PolicyLoss):
    """-min(r, ratio_max) A logprob where the token's probability moved by no more than delta the way A wants.

    The trust region is the total variation of the token's probability, not its ratio.
    """

    delta_low: float = 0.15
    delta_high: float = 0.15
    ratio_max: float = 20.0
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        at_least("delta_low", self.delta_low, 0.0)
        at_least("delta_high", self.delta_high, 0.0)
        above("ratio_max", self.ratio_max, 0.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.dppo_tv.delta_low = self.delta_low
        wire.dppo_tv.delta_high = self.delta_high
        wire.dppo_tv.ratio_max = self.ratio_max
        self._correct(wire)


@dataclass(frozen=True, slots=True)
class DRO(_PolicyLoss):
    """-logprob A + beta / 2 (logprob - behavior logprob)^2: direct reward optimization."""

    beta: float = 0.1
    correction: Correction | None = None

    def __post_init__(self) -> None:
        self._check()
        at_least("beta", self.beta, 0.0)

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.dro.beta = self.beta
        self._correct(wire)


PolicyLoss = ImportanceSampling | PPO | GSPO | CISPO | SAPO | GMPO | DPPO | DRO
