"""The objective of a `forward_backward`: one loss or several, each with its coefficient and denominator.

    policy.forward_backward(samples, ot.PPO(), denominator=samples.loss_tokens)
    policy.forward_backward(samples, {
        "policy": ot.Component(ot.PPO(correction=ot.TIS()), denominator=tokens),
        "kl": ot.Component(ot.KL(), coefficient=0.01, denominator=tokens),
        "supervised": ot.Component(ot.CrossEntropy(), coefficient=0.1, denominator=labelled),
    })

The trainer sums each term over the tokens of the rows that take part in it (`TrainSample.components`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from opentinker.errors import invalid
from opentinker.training.policy_losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    ImportanceSampling,
    PolicyLoss,
)
from opentinker.training.token_losses import (
    KL,
    CrossEntropy,
    Distillation,
    Entropy,
    Registered,
    TokenLoss,
    Value,
)
from opentinkerapi.data.v1 import loss_pb2

Loss = PolicyLoss | TokenLoss


@dataclass(frozen=True, slots=True)
class Component:
    """A term of the objective: coefficient * sum(loss) / denominator. Without a denominator: deferred."""

    loss: Loss
    coefficient: float = 1.0
    denominator: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise invalid("loss", f"{self.loss!r} is none of {known()}")
        if not math.isfinite(self.coefficient):
            raise invalid("coefficient", f"must be finite, not {self.coefficient}")
        if self.denominator is not None:
            _check_denominator(self.denominator)


Losses = Loss | Component | Mapping[str, Loss | Component]
"""One term, or several by name."""


def named(losses: Losses) -> dict[str, Component]:
    """The terms of an objective by name. InvalidArgument on what is no loss."""
    given = losses if isinstance(losses, Mapping) else {_name(losses): losses}
    if not given:
        raise invalid("loss", "at least one loss is needed")
    return {name: loss if isinstance(loss, Component) else Component(loss) for name, loss in given.items()}


def components(
    losses: Losses, denominator: float | Mapping[str, float] | None
) -> list[loss_pb2.LossComponent]:
    """The terms of an objective as messages.

    `denominator` holds for every component, or by name; one of the component's own comes first. Without
    either a component is deferred: OptimStep carries its denominator. InvalidArgument on what is no loss,
    and on a denominator that is not positive, or names no component.
    """
    terms = named(losses)
    given = denominator if isinstance(denominator, Mapping) else dict.fromkeys(terms, denominator)
    if extra := set(given) - set(terms):
        raise invalid("denominator", f"{sorted(extra)} name no component; there are {sorted(terms)}")
    result = []
    for name, term in terms.items():
        wire = loss_pb2.LossComponent(name=name)
        term.loss.fill(wire)
        if term.coefficient != 1.0:
            wire.coefficient = term.coefficient
        value = given.get(name) if term.denominator is None else term.denominator
        if value is None:
            wire.deferred.SetInParent()
        else:
            _check_denominator(value)
            wire.denominator = float(value)
        result.append(wire)
    return result


def known() -> str:
    """The losses there are, for messages."""
    return ", ".join(f"{kind.__name__}()" for kind in Loss.__args__)


def _name(loss: object) -> str:
    inner = loss.loss if isinstance(loss, Component) else loss
    return str(getattr(inner, "component", ""))


def _check_denominator(value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise invalid("denominator", f"must be a positive finite number, not {value}")


__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GSPO",
    "KL",
    "PPO",
    "SAPO",
    "Component",
    "CrossEntropy",
    "Distillation",
    "Entropy",
    "ImportanceSampling",
    "Loss",
    "Losses",
    "PolicyLoss",
    "Registered",
    "TokenLoss",
    "Value",
    "components",
    "known",
    "named",
]
