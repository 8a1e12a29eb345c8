"""The losses of this version, as typed options. The trainer sums; the caller supplies the denominator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from opentinker.errors import invalid
from opentinkerapi.data.v1 import loss_pb2


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """-r A per token, with r = exp(logprob - behavior logprob)."""

    component: ClassVar[str] = "policy"
    needs_behavior: ClassVar[bool] = True

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.importance_sampling.SetInParent()


@dataclass(frozen=True, slots=True)
class PPO:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) per token; `dual_clip` bounds it where A < 0."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    component: ClassVar[str] = "policy"
    needs_behavior: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise invalid("clip_low", f"must be in [0, 1), not {self.clip_low}")
        if not (math.isfinite(self.clip_high) and self.clip_high >= 0):
            raise invalid("clip_high", f"must be a finite number of at least 0, not {self.clip_high}")
        if self.dual_clip is not None and not (math.isfinite(self.dual_clip) and self.dual_clip > 1):
            raise invalid("dual_clip", f"must be above 1, not {self.dual_clip}")

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.ppo.clip_low = self.clip_low
        wire.ppo.clip_high = self.clip_high
        if self.dual_clip is not None:
            wire.ppo.dual_clip = self.dual_clip


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-w logprob per token; the weights w of the samples have any sign, default 1."""

    component: ClassVar[str] = "supervised"
    needs_behavior: ClassVar[bool] = False

    def fill(self, wire: loss_pb2.LossComponent) -> None:
        """Set the loss of a component."""
        wire.cross_entropy.SetInParent()


Loss = ImportanceSampling | PPO | CrossEntropy

Losses = Loss | Mapping[str, Loss]
"""One loss, or several as named components of one objective."""


def components(
    losses: Losses, denominator: float | Mapping[str, float] | None
) -> list[loss_pb2.LossComponent]:
    """The terms of an objective as messages. Without a denominator a component is deferred: OptimStep
    carries it.

    InvalidArgument on what is no loss, and on a denominator that is not positive, or names no component.
    """
    named = losses if isinstance(losses, Mapping) else {getattr(losses, "component", ""): losses}
    if not named:
        raise invalid("loss", "at least one loss is needed")
    for name, loss in named.items():
        if not isinstance(loss, Loss):
            raise invalid(
                "loss",
                f"{loss!r} is none of ImportanceSampling(), PPO() and CrossEntropy() ({name or 'loss'})",
            )
    given = denominator if isinstance(denominator, Mapping) else dict.fromkeys(named, denominator)
    if extra := set(given) - set(named):
        raise invalid("denominator", f"{sorted(extra)} name no component; there are {sorted(named)}")
    result = []
    for name, loss in named.items():
        wire = loss_pb2.LossComponent(name=name)
        loss.fill(wire)
        value = given.get(name)
        if value is None:
            wire.deferred.SetInParent()
        elif math.isfinite(value) and value > 0:
            wire.denominator = float(value)
        else:
            raise invalid("denominator", f"must be a positive finite number, not {value}")
        result.append(wire)
    return result
