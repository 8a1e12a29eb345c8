"""What the losses read: one entry a loss token, in tensors of [N]. Masked tokens never get here."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""exp of more than this says nothing but "far away" and soon overflows."""

TokenMetrics = dict[str, Tensor]
"""Metric name -> its value at each token [N]; the metric is the mean."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Everything beside the logprobs; None where the request has none of it, as its admission checked."""

    sequences: Tensor
    """[N] integers: the number of each token's sequence, counted from 0."""
    behavior_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    """NaN at tokens of samples that have none."""
    advantages: Tensor | None = None
    weights: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None
    entropy: Tensor | None = None
    """Differentiable."""
    values: Tensor | None = None
    """Differentiable: what the value head says now."""

    def sequence_sums(self, values: Tensor) -> Tensor:
        """[N]: the sum of `values` [N] over the token's sequence."""
        count = int(self.sequences.max()) + 1
        return values.new_zeros(count).index_add(0, self.sequences, values)[self.sequences]

    def sequence_means(self, values: Tensor) -> Tensor:
        """[N]: the mean of `values` [N] over the token's sequence."""
        return self.sequence_sums(values) / self.sequence_sums(torch.ones_like(values))


def given(tensor: Tensor | None) -> Tensor:
    """An input that admission has checked to be there."""
    assert tensor is not None, "checked at admission"
    return tensor


def base_logprobs(inputs: TokenInputs) -> Tensor:
    """[N]: what the ratio of policy losses is taken to: proximal logprobs, else those of the sampler."""
    behavior, proximal = given(inputs.behavior_logprobs), inputs.proximal_logprobs
    return behavior if proximal is None else torch.where(proximal.isnan(), behavior, proximal)


def log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """logprobs - other, bounded."""
    return (logprobs - other).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def graft(variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """`value` [N], whose derivative with respect to `variable` [N] is `slope` [N]."""
    result: Tensor = _Graft.apply(variable, value.detach(), slope.detach())  # type: ignore[no-untyped-call]
    return result


class _Graft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None
