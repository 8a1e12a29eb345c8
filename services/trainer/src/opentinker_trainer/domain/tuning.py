"""What is trained and how a step moves it, as typed values that are checked once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

DEFAULT_ALPHA = 32.0
FLOAT32_BYTES = 4
OUTPUT_LAYER = "lm_head"
"""Target that stands for the unembedding, whatever the model calls it."""
_COPIES = 5
"""Of each trained weight: itself, accumulated gradient, one request's gradient, two moments."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """An adapter over the frozen base; the scale is alpha / rank."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    """Leaf names of linear layers, sorted; "lm_head" is the unembedding."""
    value_head: bool = False
    """Train a linear map from the last hidden state to one number beside."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""


@dataclass(frozen=True, slots=True)
class FullSpec:
    """Every weight is trained, in a copy of the base."""

    value_head: bool = False
    activation_checkpointing: bool = False


TuningSpec = LoraSpec | FullSpec
TUNINGS = ("lora", "full")
"""Kinds of tuning, as GetCapabilities lists them."""


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of the base model decides which tunings it takes, and what they cost."""

    linear_layers: Mapping[str, LinearLayer]
    """By leaf name, without the output layer."""
    output_layer: LinearLayer
    """From the hidden state to the vocabulary."""
    weight_count: int
    """Tied weights counted once."""
    activation_checkpointing: bool

    def layer(self, target: str) -> LinearLayer | None:
        """The layers that a target names."""
        return self.output_layer if target == OUTPUT_LAYER else self.linear_layers.get(target)


def check_tuning(spec: TuningSpec, shape: ModelShape, max_rank: int) -> TuningSpec:
    """The tuning asked for, target modules filled in. ServiceError names what cannot be.

    INVALID_FIELD, or UNSUPPORTED_OPTION for activation checkpointing of a model that cannot.
    """
    if spec.activation_checkpointing and not shape.activation_checkpointing:
        text = "this model's layers cannot compute their activations again"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tuning.activation_checkpointing")
    if isinstance(spec, FullSpec):
        return spec
    if not 1 <= spec.rank <= max_rank:
        text = f"rank {spec.rank} is outside 1 to {max_rank}, what this server takes"
        raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.rank")
    if not (math.isfinite(spec.alpha) and spec.alpha > 0):
        raise ServiceError(Reason.INVALID_FIELD, "must be a positive number", field="tuning.lora.alpha")
    for target in spec.target_modules:
        if shape.layer(target) is None:
            known = ", ".join([*sorted(shape.linear_layers), OUTPUT_LAYER])
            text = f"{target!r} is no linear layer of this model; it has {known}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="tuning.lora.target_modules")
    targets = tuple(sorted(set(spec.target_modules) or shape.linear_layers))
    return replace(spec, target_modules=targets)


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


def tuning_facts(spec: TuningSpec) -> dict[str, str | int | float | bool]:
    """What manifests record of a tuning."""
    if isinstance(spec, FullSpec):
        return {"tuning": "full", "value_head": spec.value_head}
    return {"tuning": "lora", "rank": spec.rank, "alpha": spec.alpha, "value_head": spec.value_head}


def policy_bytes(spec: TuningSpec, shape: ModelShape, *, forward_bytes: int, ranks: int = 1) -> int:
    """Memory that a policy takes in one engine process beside the base model.

    `forward_bytes` is the size of a weight in the forward pass: below 4 a full-parameter policy has a copy of
    that precision beside its float32 weights. Over several ranks such a policy is cut; adapters are not.
    """
    if isinstance(spec, FullSpec):
        copy = forward_bytes if forward_bytes < FLOAT32_BYTES else 0
        total = shape.weight_count * (FLOAT32_BYTES * _COPIES + copy) // ranks
    else:
        layers = [layer for target in spec.target_modules if (layer := shape.layer(target)) is not None]
        weights = sum(layer.count * spec.rank * (layer.in_features + layer.out_features) for layer in layers)
        total = weights * FLOAT32_BYTES * _COPIES
    if spec.value_head:
        total += (shape.output_layer.in_features + 1) * FLOAT32_BYTES * _COPIES
    return total
