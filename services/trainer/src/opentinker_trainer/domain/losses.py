"""The losses that a request can ask for, as typed values.

A component is summed over its loss tokens; its denominator is given with the request or deferred to the
optimizer step. Nothing is averaged anywhere else.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """-r A with r = exp(logprob - behavior logprob)."""


@dataclass(frozen=True, slots=True)
class Ppo:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); where A < 0 at most -dual_clip A."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """-w logprob, with weights of any sign."""


Loss = ImportanceSampling | Ppo | CrossEntropy

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,64}")

LOSS_NAMES = ("importance_sampling", "ppo", "cross_entropy")
"""The losses of this server, as GetCapabilities lists them."""


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the objective: coefficient * sum(loss over tokens) / denominator."""

    name: str
    loss: Loss
    denominator: float | None
    """None: deferred, OptimStep carries it."""
    coefficient: float = 1.0

    @property
    def needs_behavior(self) -> bool:
        """Whether samples must carry behavior logprobs and advantages."""
        return not isinstance(self.loss, CrossEntropy)

    @property
    def factor(self) -> float:
        """What the sum is multiplied by when its gradient is accumulated."""
        return self.coefficient / (self.denominator if self.denominator is not None else 1.0)


def check_components(components: Sequence[Component]) -> None:
    """ServiceError INVALID_FIELD if names repeat or a number is outside what it may be."""
    if not components:
        raise ServiceError(Reason.INVALID_FIELD, "at least one loss component is needed", field="losses")
    seen: set[str] = set()
    for index, component in enumerate(components):
        field = f"losses[{index}]"
        if not _NAME.fullmatch(component.name) or component.name in seen:
            text = "must be unique, of 1 to 64 letters, digits and ._:/-"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.name")
        seen.add(component.name)
        if component.denominator is not None and not _positive(component.denominator):
            raise ServiceError(
                Reason.INVALID_FIELD, "must be a positive finite number", field=f"{field}.denominator"
            )
        if not math.isfinite(component.coefficient):
            raise ServiceError(Reason.INVALID_FIELD, "must be finite", field=f"{field}.coefficient")
        if isinstance(component.loss, Ppo):
            _check_ppo(component.loss, f"{field}.ppo")


def _check_ppo(loss: Ppo, field: str) -> None:
    if not 0 <= loss.clip_low < 1:
        raise ServiceError(Reason.INVALID_FIELD, "must be at least 0 and below 1", field=f"{field}.clip_low")
    if not (math.isfinite(loss.clip_high) and loss.clip_high >= 0):
        raise ServiceError(
            Reason.INVALID_FIELD, "must be a finite number, at least 0", field=f"{field}.clip_high"
        )
    if loss.dual_clip is not None and not (math.isfinite(loss.dual_clip) and loss.dual_clip > 1):
        raise ServiceError(
            Reason.INVALID_FIELD, "must be a finite number above 1", field=f"{field}.dual_clip"
        )


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
