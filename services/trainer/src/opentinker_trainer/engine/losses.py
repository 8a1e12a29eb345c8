"""Per-token losses and their metrics. Every tensor here is [N]: loss tokens only, masked ones never enter."""

from dataclasses import dataclass

import torch
from torch import Tensor

from opentinker_trainer.domain.losses import CrossEntropy, ImportanceSampling, Loss, Ppo

_LOG_RATIO_BOUND = 20.0
"""exp of more than this says nothing but "far away" and soon overflows."""

Metrics = dict[str, tuple[float, float]]
"""Metric name -> (sum, weight); the mean is sum / weight."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a loss reads beside the logprobs; None where the component does not need it."""

    behavior_logprobs: Tensor | None
    advantages: Tensor | None
    weights: Tensor | None


def token_losses(loss: Loss, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, Metrics]:
    """The loss of each token [N], differentiable, and metrics over them."""
    match loss:
        case CrossEntropy():
            weights = inputs.weights
            return (-logprobs if weights is None else -weights * logprobs), {}
        case ImportanceSampling():
            log_ratio, advantages = _log_ratio(logprobs, inputs)
            return -log_ratio.exp() * advantages, _drift(log_ratio)
        case Ppo():
            log_ratio, advantages = _log_ratio(logprobs, inputs)
            return _ppo(loss, log_ratio, advantages)


def _log_ratio(logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    assert inputs.behavior_logprobs is not None, "checked at admission"
    assert inputs.advantages is not None, "checked at admission"
    log_ratio = (logprobs - inputs.behavior_logprobs).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return log_ratio, inputs.advantages


def _ppo(loss: Ppo, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    worst = torch.maximum(plain, clipped)
    metrics = _drift(log_ratio)
    count = float(log_ratio.numel())
    with torch.no_grad():
        metrics["actor/pg_clipfrac"] = (float((clipped > plain).sum()), count)
    if loss.dual_clip is not None:
        bounded = torch.minimum(worst, -advantages * loss.dual_clip)
        negative = advantages < 0
        with torch.no_grad():
            hits = float(((worst > bounded) & negative).sum())
            metrics["actor/pg_clipfrac_lower"] = (hits, count)
        worst = torch.where(negative, bounded, worst)
    return worst, metrics


def _drift(log_ratio: Tensor) -> Metrics:
    """How far the trained policy is from the one that sampled, over the tokens given."""
    with torch.no_grad():
        d = log_ratio.double()
        ratio = d.exp()
        count = float(d.numel())
        return {
            "actor/ppo_kl": (float(-d.sum()), count),
            "rollout_corr/logprob_abs_diff": (float(d.abs().sum()), count),
            "rollout_corr/k3": (float((ratio - d - 1).sum()), count),
            # ESS = mean(ratio)^2 / mean(ratio^2), exact over any split.
            "rollout_corr/ratio": (float(ratio.sum()), count),
            "rollout_corr/ratio_squared": (float((ratio * ratio).sum()), count),
        }
