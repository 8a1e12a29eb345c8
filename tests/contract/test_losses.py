"""What the client can ask for, the trainer takes and means the same by: options, defaults, needed arrays."""

from dataclasses import fields
from typing import Any

import pytest

import opentinker as ot
from opentinker.training.losses import Loss, components
from opentinker_kit.errors import ServiceError
from opentinker_trainer.wire_losses import components_of

CORRECTIONS = (
    ot.TIS(),
    ot.IcePop(),
    ot.SequenceTruncate(),
    ot.SequenceMask(),
    ot.GeometricMask(),
    ot.Decoupled(),
)
NEEDS = {"logprobs": "behavior_logprobs"}
PLAIN = [kind for kind in Loss.__args__ if kind is not ot.Registered]


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: str(kind.__name__))
def test_options_and_needs_agree(kind: Any) -> None:
    for loss in (kind(), *_variants(kind)):
        (component,) = components_of(components({"it": ot.Component(loss, 0.5, 2.0)}, None))
        for name in (each.name for each in fields(loss) if each.name != "correction"):
            assert _plain(getattr(component.loss, name)) == getattr(loss, name), name
        assert {NEEDS.get(name, name) for name in loss.needs} <= set(component.needs)
        assert set(component.needs) <= {NEEDS.get(name, name) for name in loss.needs}
        assert (component.coefficient, component.denominator) == (0.5, 2.0)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda value: type(value).__name__)
def test_corrections_agree(correction: Any) -> None:
    for kind in PLAIN:
        if "correction" not in {each.name for each in fields(kind)}:
            continue
        loss = kind(correction=correction)
        (component,) = components_of(components(loss, None))
        assert component.correction is not None
        for name in ("low", "high", "token_high"):
            assert getattr(component.correction, name) == getattr(correction, name, None), name
        assert {NEEDS.get(name, name) for name in loss.needs} == set(component.needs)


def test_a_loss_that_nobody_registered_is_refused() -> None:
    with pytest.raises(ServiceError, match="nothing"):
        components_of(components(ot.Registered("nothing"), 1.0))


def _variants(kind: Any) -> list[Any]:
    if kind in (ot.KL, ot.Distillation):
        return [
            kind(estimator, weighted)
            for estimator in ("k1", "k2", "k3", "k3_straight_through")
            for weighted in (False, True)
        ]
    return [ot.Value(clip=0.2)] if kind is ot.Value else []


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
