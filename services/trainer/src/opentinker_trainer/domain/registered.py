"""Losses beyond the typed ones, which requests name, with their options.

Each is a frozen dataclass of numbers under its name; the formula is in `engine/registered.py`. All move a
policy along advantages.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, TypeVar

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    """Base of registered losses; the fields of a subclass are its options."""

    silent_without_advantage: ClassVar[bool] = True
    """Whether a token whose advantage is 0 has no gradient."""
    corrects: ClassVar[bool] = False
    """Whether it weighs the sampler's distance itself, so that an OffPolicyCorrection would do so twice."""

    def conflict(self) -> tuple[str, str] | None:
        """An option that does not go with another one, and why."""
        return None


_Kind = TypeVar("_Kind", bound=type[RegisteredLoss])
_LOSSES: dict[str, type[RegisteredLoss]] = {}


def registered(name: str) -> Callable[[_Kind], _Kind]:
    """Register a class of options under the name of its loss."""

    def register(kind: _Kind) -> _Kind:
        assert name not in _LOSSES, name
        _LOSSES[name] = kind
        return kind

    return register


def _option(default: float, low: float = 0.0, high: float = math.inf) -> float:
    """An option with its default and what it may be, both ends included."""
    value: float = field(default=default, metadata={"low": low, "high": high})
    return value


@registered("prime_rl")
@dataclass(frozen=True, slots=True)
class PrimeRl(RegisteredLoss):
    """-r A where the probability has moved along A by no more than a bound, plus kl_tau (log r)^2, with r
    taken to the sampler (the default loss of prime-rl).
    """

    silent_without_advantage: ClassVar[bool] = False
    corrects: ClassVar[bool] = True

    mask_low: float = _option(0.2, high=1.0)
    """Bound on a fall of the probability where A < 0."""
    mask_high: float = _option(0.2, high=1.0)
    """Bound on a rise of the probability where A > 0."""
    kl_tau: float = _option(1e-3)


@registered("reinforce_is")
@dataclass(frozen=True, slots=True)
class ReinforceIs(RegisteredLoss):
    """-sg(clamp(r, ratio_min, ratio_max)) A logprob with r taken to the sampler (torchforge's REINFORCE)."""

    corrects: ClassVar[bool] = True

    ratio_min: float = _option(0.1)
    ratio_max: float = _option(10.0)

    def conflict(self) -> tuple[str, str] | None:
        if self.ratio_min > self.ratio_max:
            return "ratio_min", f"{self.ratio_min} is above ratio_max {self.ratio_max}"
        return None


@registered("art")
@dataclass(frozen=True, slots=True)
class Art(RegisteredLoss):
    """-sg(clip(r, 1 - epsilon, 1 + epsilon_high)) A logprob (the default loss of ART)."""

    epsilon: float = _option(1.0)
    epsilon_high: float = _option(4.0)


@registered("vespo")
@dataclass(frozen=True, slots=True)
class Vespo(RegisteredLoss):
    """-sg(W^k exp(lam (1 - W))) A logprob with W the product of r over the sequence (VESPO, with the defaults
    of TRL).
    """

    k_positive: float = _option(2.0)
    """Power where A >= 0."""
    lambda_positive: float = _option(3.0)
    """Decay where A >= 0."""
    k_negative: float = _option(3.0)
    lambda_negative: float = _option(2.0)


def registered_names() -> tuple[str, ...]:
    """The names there are, in order."""
    return tuple(sorted(_LOSSES))


def registered_kinds() -> Mapping[str, type[RegisteredLoss]]:
    """Name -> class of options."""
    return dict(_LOSSES)


def registered_loss(name: str, options: Mapping[str, float], where: str) -> RegisteredLoss:
    """The loss of that name. ServiceError UNKNOWN_LOSS (says which there are) or INVALID_FIELD.

    `where` is the field of the request that holds the name and the options.
    """
    kind = _LOSSES.get(name)
    if kind is None:
        text = f"no loss {name!r} is registered; this server has {', '.join(registered_names())}"
        raise ServiceError(Reason.UNKNOWN_LOSS, text, field=f"{where}.loss")
    known = {each.name: each.metadata for each in fields(kind)}
    for option, value in options.items():
        at = f"{where}.options.{option}"
        if option not in known:
            text = f"{name} has no option {option!r}; it has {', '.join(known)}"
            raise ServiceError(Reason.INVALID_FIELD, text, field=at)
        low, high = known[option]["low"], known[option]["high"]
        if not (math.isfinite(value) and low <= value <= high):
            upper = "" if math.isinf(high) else f" and at most {high:g}"
            text = f"is {value}; it must be a finite number, at least {low:g}{upper}"
            raise ServiceError(Reason.INVALID_FIELD, text, field=at)
    loss = kind(**options)
    if (conflict := loss.conflict()) is not None:
        raise ServiceError(Reason.INVALID_FIELD, conflict[1], field=f"{where}.options.{conflict[0]}")
    return loss
