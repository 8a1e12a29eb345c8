"""Estimates of KL(policy || other) at sampled tokens. Tensors are [N]."""

import torch
from torch import Tensor

from opentinker_trainer.domain.losses import Distillation, Kl, KlEstimator
from opentinker_trainer.engine.token_inputs import LOG_RATIO_BOUND, TokenInputs, given, graft, log_ratio

K3_BOUND = 10.0
"""Most that k3 may be."""
_K3_STEEPEST = 12.610862
"""exp(-d) - 1 where exp(-d) - 1 + d = 10 and d < 0."""


def divergence(estimator: KlEstimator, logprobs: Tensor, other: Tensor) -> Tensor:
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020), with d = logprob - other.

    Values are bounded: |d| by 20, k3 by 10. Gradients are not cut off there, or the tokens that are farthest
    from the reference would be the ones that nothing pulls back: they stay what they are at the bound. The
    straight-through k3 has the gradient of k2, whose expectation is that of KL on policy.
    """
    d = (logprobs - other).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match estimator:
        case KlEstimator.K1:
            return graft(logprobs, d, torch.ones_like(d))
        case KlEstimator.K2:
            return graft(logprobs, 0.5 * d.square(), d)
        case KlEstimator.K3:
            return graft(logprobs, _k3(d), -(-d).expm1().clamp(max=_K3_STEEPEST))
        case KlEstimator.K3_STRAIGHT_THROUGH:
            return graft(logprobs, _k3(d), d)


def _k3(d: Tensor) -> Tensor:
    return ((-d).expm1() + d).clamp(max=K3_BOUND)


def divergence_losses(loss: Kl | Distillation, logprobs: Tensor, inputs: TokenInputs) -> Tensor:
    """The estimate at each token; importance-weighted by exp(logprob - behavior logprob), through which the
    gradient flows too: that makes value and gradient unbiased off policy (DeepSeek-V3.2).
    """
    other = inputs.reference_logprobs if isinstance(loss, Kl) else inputs.teacher_logprobs
    estimate = divergence(loss.estimator, logprobs, given(other))
    if not loss.importance_weighted:
        return estimate
    return log_ratio(logprobs, given(inputs.behavior_logprobs)).exp() * estimate
