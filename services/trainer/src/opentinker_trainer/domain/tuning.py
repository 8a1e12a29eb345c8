"""What is trained and how a step moves it, as typed values that are checked once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

DEFAULT_ALPHA = 32.0
FLOAT32_BYTES = 4
_COPIES = 5
"""Of each adapter weight: itself, accumulated gradient, one request's gradient, two moments."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of an adapter; the scale is alpha / rank."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Leaf names of linear layers, sorted."""


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """Hyperparameters of one optimizer step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = None


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """The linear layers of one leaf name."""

    count: int
    in_features: int
    out_features: int


def check_lora(
    rank: int,
    alpha: float | None,
    targets: tuple[str, ...],
    layers: Mapping[str, LinearLayer],
    max_rank: int,
) -> LoraSpec:
    """The adapter asked for, defaults filled in. ServiceError INVALID_FIELD names what cannot be."""
    if not 1 <= rank <= max_rank:
        text = f"rank {rank} is outside 1 to {max_rank}, what this server takes"
        raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.rank")
    chosen = DEFAULT_ALPHA if alpha is None else alpha
    if not (math.isfinite(chosen) and chosen > 0):
        raise ServiceError(Reason.INVALID_FIELD, "must be a positive number", field="tuning.lora.alpha")
    for target in targets:
        if target not in layers:
            text = f"{target!r} is no linear layer of this model; it has {', '.join(sorted(layers))}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.target_modules")
    return LoraSpec(rank, chosen, tuple(sorted(set(targets) or layers)))


def check_step(step: AdamWStep) -> None:
    """ServiceError INVALID_FIELD if a hyperparameter is outside what it may be."""
    checks = [
        ("learning_rate", step.learning_rate, step.learning_rate >= 0, "a finite number, at least 0"),
        ("beta1", step.beta1, 0 <= step.beta1 < 1, "at least 0 and below 1"),
        ("beta2", step.beta2, 0 <= step.beta2 < 1, "at least 0 and below 1"),
        ("eps", step.eps, step.eps > 0, "a positive finite number"),
        ("weight_decay", step.weight_decay, step.weight_decay >= 0, "a finite number, at least 0"),
    ]
    for name, value, fits, text in checks:
        if not (math.isfinite(value) and fits):
            raise ServiceError(Reason.INVALID_FIELD, f"must be {text}, not {value}", field=f"adamw.{name}")
    clip = step.clip_norm
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        raise ServiceError(Reason.INVALID_FIELD, f"must be positive, not {clip}", field="clip_norm")


def policy_bytes(spec: LoraSpec, layers: Mapping[str, LinearLayer]) -> int:
    """Memory that a policy takes in the engine beside the base model."""
    weights = sum(
        layer.count * spec.rank * (layer.in_features + layer.out_features)
        for name, layer in layers.items()
        if name in spec.target_modules
    )
    return weights * FLOAT32_BYTES * _COPIES
