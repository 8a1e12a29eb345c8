"""AdamW with hyperparameters per step, and clipping by the global norm. State is float32 like the weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opentinker_trainer.domain.tuning import AdamWStep


@dataclass(slots=True)
class AdamWState:
    """First and second moments by parameter name, and how many steps went into them."""

    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Euclidean norm over all tensors, accumulated in float64; NaN or inf if any entry is."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def apply_step(
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    state: AdamWState,
    step: AdamWStep,
    norm: float | None = None,
) -> float:
    """Update `parameters` and `state` in place; returns the gradient's norm before clipping.

    `norm` is given where the gradient is only a part of the whole one. One that is not finite changes
    nothing: the caller skips and counts the step.
    """
    if norm is None:
        norm = global_norm(gradients)
    if not math.isfinite(norm):
        return norm
    scale = 1.0
    if step.clip_norm is not None and norm > step.clip_norm:
        scale = step.clip_norm / norm
    state.steps += 1
    correction1 = 1 - step.beta1**state.steps
    correction2 = 1 - step.beta2**state.steps
    with torch.no_grad():
        for name, parameter in parameters.items():
            gradient = gradients[name] if scale == 1.0 else gradients[name] * scale
            first = state.first.setdefault(name, torch.zeros_like(parameter))
            second = state.second.setdefault(name, torch.zeros_like(parameter))
            first.lerp_(gradient, 1 - step.beta1)
            second.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
            if step.weight_decay:
                parameter.mul_(1 - step.learning_rate * step.weight_decay)
            denominator = second.sqrt().div_(math.sqrt(correction2)).add_(step.eps)
            parameter.addcdiv_(first, denominator, value=-step.learning_rate / correction1)
    return norm
