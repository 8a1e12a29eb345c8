"""Losses of a request, between messages and domain."""

from collections.abc import Sequence
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.loss_checks import check_components
from opentinker_trainer.domain.losses import (
    LOSS_NAMES,
    Cispo,
    Component,
    Correction,
    CorrectionKind,
    CrossEntropy,
    Distillation,
    DppoTv,
    Dro,
    Entropy,
    Gmpo,
    Gspo,
    ImportanceSampling,
    Kl,
    KlEstimator,
    Loss,
    Ppo,
    Sapo,
    Value,
)
from opentinker_trainer.domain.registered import registered_loss
from opentinkerapi.data.v1 import loss_pb2
from opentinkerapi.runtime.reasons import Reason

_SIMPLE: dict[str, type[Any]] = {
    "importance_sampling": ImportanceSampling,
    "ppo": Ppo,
    "gspo": Gspo,
    "cispo": Cispo,
    "sapo": Sapo,
    "gmpo": Gmpo,
    "dppo_tv": DppoTv,
    "dro": Dro,
    "cross_entropy": CrossEntropy,
    "entropy": Entropy,
    "value": Value,
}
"""Losses whose options are numbers of the same names; the defaults stand in the domain."""

_DIVERGENCES: dict[str, type[Kl] | type[Distillation]] = {"kl": Kl, "distillation": Distillation}

_ESTIMATORS = {
    loss_pb2.KL_ESTIMATOR_K1: KlEstimator.K1,
    loss_pb2.KL_ESTIMATOR_K2: KlEstimator.K2,
    loss_pb2.KL_ESTIMATOR_K3: KlEstimator.K3,
    loss_pb2.KL_ESTIMATOR_K3_STRAIGHT_THROUGH: KlEstimator.K3_STRAIGHT_THROUGH,
}
_KINDS = {
    loss_pb2.CORRECTION_KIND_TOKEN_TRUNCATE: CorrectionKind.TOKEN_TRUNCATE,
    loss_pb2.CORRECTION_KIND_TOKEN_MASK: CorrectionKind.TOKEN_MASK,
    loss_pb2.CORRECTION_KIND_SEQUENCE_TRUNCATE: CorrectionKind.SEQUENCE_TRUNCATE,
    loss_pb2.CORRECTION_KIND_SEQUENCE_MASK: CorrectionKind.SEQUENCE_MASK,
    loss_pb2.CORRECTION_KIND_GEOMETRIC_MASK: CorrectionKind.GEOMETRIC_MASK,
    loss_pb2.CORRECTION_KIND_NONE: CorrectionKind.NONE,
}


def components_of(messages: Sequence[loss_pb2.LossComponent]) -> list[Component]:
    """The terms of the objective. ServiceError UNKNOWN_LOSS or INVALID_FIELD."""
    components = [_component(message, f"losses[{index}]") for index, message in enumerate(messages)]
    check_components(components)
    return components


def _component(message: loss_pb2.LossComponent, where: str) -> Component:
    match message.WhichOneof("normalization"):
        case "denominator":
            denominator: float | None = message.denominator
        case "deferred":
            denominator = None
        case _:
            text = "say what the sum is divided by: a denominator, or deferred to OptimStep"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.denominator")
    return Component(
        message.name,
        _loss(message, where),
        denominator,
        message.coefficient if message.HasField("coefficient") else 1.0,
        _correction(message.correction, f"{where}.correction") if message.HasField("correction") else None,
    )


def _loss(message: loss_pb2.LossComponent, where: str) -> Loss:
    name = message.WhichOneof("loss")
    if name is None:
        text = f"one of {', '.join(LOSS_NAMES)} must be set"
        raise ServiceError(Reason.UNKNOWN_LOSS, text, field=f"{where}.loss")
    if name == "registered":
        options = dict(message.registered.options)
        return registered_loss(message.registered.loss, options, f"{where}.registered")
    options = _numbers(getattr(message, name))
    if (kind := _DIVERGENCES.get(name)) is not None:
        value = options.pop("estimator", loss_pb2.KL_ESTIMATOR_UNSPECIFIED)
        weighted = bool(options.pop("importance_weighted", False))
        if value == loss_pb2.KL_ESTIMATOR_UNSPECIFIED:
            return kind(importance_weighted=weighted)
        if value not in _ESTIMATORS:
            text = f"{value} is none of {', '.join(loss_pb2.KlEstimator.keys()[1:])}"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.{name}.estimator")
        return kind(_ESTIMATORS[loss_pb2.KlEstimator.ValueType(int(value))], weighted)
    loss: Loss = _SIMPLE[name](**options)
    return loss


def _numbers(message: Any) -> dict[str, float]:
    """The fields that are set."""
    return {field.name: value for field, value in message.ListFields()}


def _correction(message: loss_pb2.OffPolicyCorrection, where: str) -> Correction:
    kind = _KINDS.get(message.kind)
    if kind is None:
        text = f"must be one of {', '.join(loss_pb2.CorrectionKind.keys()[1:])}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.kind")
    return Correction(
        kind,
        message.low if message.HasField("low") else None,
        message.high if message.HasField("high") else None,
        message.token_high if message.HasField("token_high") else None,
    )
