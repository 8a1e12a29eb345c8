"""Learning rates as pure functions of the step (1, 2, 3 ...), so that resuming needs no state.

    ot.fit(..., learning_rate=ot.schedules.Cosine(2e-4, steps=200, warmup=10))

Each is a frozen dataclass: it can be pickled, compared and printed. Warm-up rises on a line from peak /
warmup at step 1 to the peak at step `warmup`; a decay begins there and would be at `final` one step after the
last, so that no step is wasted on a rate of 0.
"""

import math
from dataclasses import dataclass

from opentinker.errors import invalid
from opentinker.training.limits import at_least


@dataclass(frozen=True, slots=True)
class Constant:
    """`rate` at every step, after `warmup` steps."""

    rate: float
    warmup: int = 0

    def __post_init__(self) -> None:
        at_least("rate", self.rate, 0.0)
        _check_steps(self.warmup, None)

    def __call__(self, step: int) -> float:
        return self.rate * _rise(step, self.warmup)


@dataclass(frozen=True, slots=True)
class Linear:
    """From `peak` on a line to `final`."""

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self.peak, self.final)
        _check_steps(self.warmup, self.steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * _rise(step, self.warmup)
        return self.peak + (self.final - self.peak) * _progress(step, self.warmup, self.steps)


@dataclass(frozen=True, slots=True)
class Cosine:
    """From `peak` on half a cosine to `final`."""

    peak: float
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self.peak, self.final)
        _check_steps(self.warmup, self.steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * _rise(step, self.warmup)
        fallen = (1 - math.cos(math.pi * _progress(step, self.warmup, self.steps))) / 2
        return self.peak + (self.final - self.peak) * fallen


@dataclass(frozen=True, slots=True)
class WarmupStableDecay:
    """Warm-up, `peak`, and in the last `decay` of all steps a line to `final`."""

    peak: float
    steps: int
    warmup: int = 0
    decay: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self.peak, self.final)
        _check_steps(self.warmup, self.steps)
        if not 0 <= self.decay <= self.steps - self.warmup:
            raise invalid("decay", f"must be in [0, steps - warmup], not {self.decay}")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * _rise(step, self.warmup)
        return self.peak + (self.final - self.peak) * _progress(step, self.steps - self.decay, self.steps)


def _rise(step: int, warmup: int) -> float:
    """The part of the peak that warm-up has reached."""
    _check_step(step)
    return min(step / warmup, 1.0) if warmup else 1.0


def _progress(step: int, begin: int, steps: int) -> float:
    """0 up to step `begin` (the first at least), 1 from the step after the last."""
    _check_step(step)
    first = max(begin, 1)
    return min(max((step - first) / (steps + 1 - first), 0.0), 1.0)


def _check_step(step: int) -> None:
    if step < 1:
        raise invalid("step", f"steps are counted from 1, not {step}")


def _check_rates(peak: float, final: float) -> None:
    at_least("peak", peak, 0.0)
    at_least("final", final, 0.0)


def _check_steps(warmup: int, steps: int | None) -> None:
    if warmup < 0:
        raise invalid("warmup", f"must be at least 0, not {warmup}")
    if steps is not None and not (steps >= 1 and warmup <= steps):
        raise invalid("steps", f"must be at least 1 and warmup = {warmup}, not {steps}")
