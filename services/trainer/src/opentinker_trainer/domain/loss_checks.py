"""What makes the losses of a request acceptable. Every refusal names the field."""

import math
import re
from collections.abc import Sequence

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import (
    Cispo,
    Component,
    Correction,
    CorrectionKind,
    DppoTv,
    Dro,
    Gmpo,
    Gspo,
    Loss,
    Ppo,
    Sapo,
    Value,
)
from opentinker_trainer.domain.registered import RegisteredLoss
from opentinkerapi.runtime.reasons import Reason

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,64}")
_TRUNCATES = (CorrectionKind.TOKEN_TRUNCATE, CorrectionKind.SEQUENCE_TRUNCATE)


def check_components(components: Sequence[Component]) -> None:
    """ServiceError INVALID_FIELD if names repeat or a number is outside what it may be."""
    if not components:
        raise ServiceError(Reason.INVALID_FIELD, "at least one loss component is needed", field="losses")
    seen: set[str] = set()
    for index, component in enumerate(components):
        where = f"losses[{index}]"
        if not _NAME.fullmatch(component.name) or component.name in seen:
            raise _refuse(f"{where}.name", "must be unique, of 1 to 64 letters, digits and ._:/-")
        seen.add(component.name)
        if component.denominator is not None:
            _above(f"{where}.denominator", component.denominator, 0.0)
        if not math.isfinite(component.coefficient):
            raise _refuse(f"{where}.coefficient", "must be finite")
        _check_loss(component.loss, where)
        if component.correction is not None:
            _check_correction(component, component.correction, f"{where}.correction")


def check_value_head(components: Sequence[Component], *, has_one: bool) -> None:
    """ServiceError UNSUPPORTED_OPTION for a value loss of a policy without a value head."""
    for index, component in enumerate(components):
        if component.needs_values and not has_one:
            text = f"component {component.name!r} needs a policy with a value head (tuning.value_head)"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=f"losses[{index}].value")


def _check_loss(loss: Loss, where: str) -> None:
    match loss:
        case Ppo(clip_low, clip_high, dual_clip):
            _check_clip(f"{where}.ppo", clip_low, clip_high)
            if dual_clip is not None:
                _above(f"{where}.ppo.dual_clip", dual_clip, 1.0)
        case Gspo(clip_low, clip_high):
            _check_clip(f"{where}.gspo", clip_low, clip_high)
        case Cispo(ratio_min, ratio_max):
            _at_least(f"{where}.cispo.ratio_min", ratio_min, 0.0)
            _above(f"{where}.cispo.ratio_max", ratio_max, 0.0)
            if ratio_min > ratio_max:
                raise _refuse(f"{where}.cispo.ratio_min", f"{ratio_min} is above ratio_max {ratio_max}")
        case Sapo(tau_positive, tau_negative):
            _above(f"{where}.sapo.tau_positive", tau_positive, 0.0)
            _above(f"{where}.sapo.tau_negative", tau_negative, 0.0)
        case Gmpo(clip_low, clip_high):
            _at_least(f"{where}.gmpo.clip_low", clip_low, 0.0)
            _at_least(f"{where}.gmpo.clip_high", clip_high, 0.0)
        case DppoTv(delta_low, delta_high, ratio_max):
            _at_least(f"{where}.dppo_tv.delta_low", delta_low, 0.0)
            _at_least(f"{where}.dppo_tv.delta_high", delta_high, 0.0)
            _above(f"{where}.dppo_tv.ratio_max", ratio_max, 0.0)
        case Dro(beta):
            _at_least(f"{where}.dro.beta", beta, 0.0)
        case Value(clip) if clip is not None:
            _above(f"{where}.value.clip", clip, 0.0)
        case _:
            pass


def _check_clip(where: str, low: float, high: float) -> None:
    if not 0 <= low < 1:
        raise _refuse(f"{where}.clip_low", "must be at least 0 and below 1")
    _at_least(f"{where}.clip_high", high, 0.0)


def _check_correction(component: Component, correction: Correction, where: str) -> None:
    if not component.is_policy:
        raise _refuse(where, "only policy losses take a correction")
    if isinstance(component.loss, RegisteredLoss) and component.loss.corrects:
        raise _refuse(where, "this loss takes its ratio to the sampler already")
    kind = correction.kind
    allowed = {
        "low": kind not in (*_TRUNCATES, CorrectionKind.NONE),
        "high": kind is not CorrectionKind.NONE,
        "token_high": kind is CorrectionKind.GEOMETRIC_MASK,
    }
    for name, may in allowed.items():
        bound = getattr(correction, name)
        if bound is None:
            continue
        if not may:
            raise _refuse(f"{where}.{name}", f"has no effect on {kind.value}")
        _at_least(f"{where}.{name}", bound, 0.0)
    low, high = correction.low, correction.high
    if kind in _TRUNCATES and high is None:
        raise _refuse(f"{where}.high", f"{kind.value} needs it")
    if kind is not CorrectionKind.NONE and low is None and high is None:
        raise _refuse(f"{where}.high", f"{kind.value} needs a bound, low or high")
    if low is not None and high is not None and low > high:
        raise _refuse(f"{where}.low", f"{low} is above high {high}")


def _at_least(field: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value >= low):
        raise _refuse(field, f"must be a finite number, at least {low:g}")


def _above(field: str, value: float, low: float) -> None:
    if not (math.isfinite(value) and value > low):
        raise _refuse(field, f"must be a finite number above {low:g}")


def _refuse(field: str, text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_FIELD, text, field=field)
