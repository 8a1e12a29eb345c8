"""A policy as the engine holds it: weights, optimizer, accumulated gradient, randomness."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.tuning import AdamWStep
from opentinker_trainer.engine.optimizer import AdamWState, apply_step
from opentinker_trainer.engine.weights import Gradient, Weights
from opentinkerapi.runtime.reasons import Reason

__all__ = ["RESOLVED", "Gradient", "Policy", "StepReport", "check_denominators"]

RESOLVED = ""
"""Bucket of gradients whose denominators are known; every deferred component has its own."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What an optimizer step did."""

    step: int
    grad_norm: float
    skipped: bool
    consecutive_skips: int


@dataclass(slots=True)
class Policy:
    """One trainable policy. Nothing here is shared with another policy."""

    weights: Weights
    generator: torch.Generator
    """The policy's own randomness, seeded at creation, saved with it."""
    optimizer: AdamWState = field(default_factory=AdamWState)
    gradients: dict[str, Gradient] = field(default_factory=dict)
    """Accumulated since the last step, by bucket."""
    steps: int = 0
    """Optimizer steps taken; skipped ones do not count."""
    consecutive_skips: int = 0

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> float32 weights (this rank's part)."""
        return self.weights.parameters

    def add(self, gradients: Mapping[str, Gradient]) -> None:
        """Add one ForwardBackward's gradient. Until here a failing one has changed nothing."""
        for bucket, gradient in gradients.items():
            kept = self.gradients.get(bucket)
            if not kept:
                self.gradients[bucket] = dict(gradient)
                continue
            for name, value in gradient.items():
                kept[name] = kept[name] + value

    def step(self, hyper: AdamWStep, denominators: Mapping[str, float]) -> StepReport:
        """Apply and clear the accumulated gradient; a gradient that is not finite is cleared and counted.

        ServiceError INVALID_FIELD, with nothing changed, unless `denominators` names exactly the deferred
        components of the accumulated gradient.
        """
        deferred = set(self.gradients) - {RESOLVED}
        check_denominators(deferred, denominators)
        total = self._total(denominators)
        norm = apply_step(self.parameters, total, self.optimizer, hyper, self.weights.norm(total))
        self.weights.changed()
        self.gradients = {}
        skipped = not math.isfinite(norm)
        if skipped:
            self.consecutive_skips += 1
        else:
            self.steps += 1
            self.consecutive_skips = 0
        return StepReport(self.steps, norm, skipped, self.consecutive_skips)

    def _total(self, denominators: Mapping[str, float]) -> Gradient:
        if self.gradients.keys() == {RESOLVED} and self.gradients[RESOLVED].keys() == self.parameters.keys():
            return self.gradients[RESOLVED]
        total = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        for bucket, gradient in sorted(self.gradients.items()):
            scale = 1.0 if bucket == RESOLVED else 1.0 / denominators[bucket]
            for name, value in gradient.items():
                total[name].add_(value, alpha=scale)
        return total


def check_denominators(deferred: set[str], given: Mapping[str, float]) -> None:
    """ServiceError INVALID_FIELD unless each deferred component gets its denominator, and no other does."""
    missing, extra = sorted(deferred - set(given)), sorted(set(given) - deferred)
    if missing:
        raise ServiceError(
            Reason.INVALID_FIELD,
            f"component {missing[0]!r} was deferred and needs its denominator here",
            field="denominators",
        )
    if extra:
        raise ServiceError(
            Reason.INVALID_FIELD,
            f"component {extra[0]!r} was not deferred in the ForwardBackwards of this step",
            field="denominators",
        )
