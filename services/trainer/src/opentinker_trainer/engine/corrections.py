"""Off-policy corrections: a detached weight for each token from w = exp(proximal - behavior logprob), and how
far trainer and sampler are apart. Tensors are [N].
"""

import torch
from torch import Tensor

from opentinker_trainer.domain.losses import Correction, CorrectionKind
from opentinker_trainer.engine.token_inputs import (
    LOG_RATIO_BOUND,
    TokenInputs,
    TokenMetrics,
    base_logprobs,
    given,
    log_ratio,
)


def correction_weights(correction: Correction, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """The weight of each token, and whether a bound changed it."""
    log_w = log_ratio(given(inputs.proximal_logprobs), given(inputs.behavior_logprobs)).detach()
    low = 0.0 if correction.low is None else correction.low
    high = torch.inf if correction.high is None else correction.high
    match correction.kind:
        case CorrectionKind.NONE:
            weights = log_w.exp()
            return weights, torch.zeros_like(weights, dtype=torch.bool)
        case CorrectionKind.TOKEN_TRUNCATE:
            return _truncated(log_w.exp(), high)
        case CorrectionKind.TOKEN_MASK:
            return _masked(log_w.exp(), log_w.exp(), low, high)
        case CorrectionKind.SEQUENCE_TRUNCATE:
            return _truncated(_product(log_w, inputs), high)
        case CorrectionKind.SEQUENCE_MASK:
            product = _product(log_w, inputs)
            return _masked(product, product, low, high)
        case CorrectionKind.GEOMETRIC_MASK:
            bound = torch.inf if correction.token_high is None else correction.token_high
            weights, bounded = _truncated(log_w.exp(), bound)
            masked, outside = _masked(weights, inputs.sequence_means(log_w).exp(), low, high)
            return masked, bounded | outside


def _product(log_w: Tensor, inputs: TokenInputs) -> Tensor:
    return inputs.sequence_sums(log_w).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def _truncated(weights: Tensor, high: float) -> tuple[Tensor, Tensor]:
    return weights.clamp(max=high), weights > high


def _masked(weights: Tensor, judged: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    outside = (judged < low) | (judged > high)
    return torch.where(outside, 0.0, weights), outside


def drift(logprobs: Tensor, inputs: TokenInputs) -> TokenMetrics:
    """How far the policy has moved, and how far the trainer is from the sampler.

    The trainer's logprobs are the proximal ones where the sample has them (before any update of this batch),
    else those of this pass. The effective sample size is mean(ratio)^2 / mean(ratio_squared), exact over any
    split.
    """
    behavior, proximal = given(inputs.behavior_logprobs), inputs.proximal_logprobs
    now = logprobs.detach()
    before = now if proximal is None else torch.where(proximal.isnan(), now, proximal)
    d = log_ratio(before.double(), behavior.double())
    ratio = d.exp()
    return {
        "actor/ppo_kl": -log_ratio(now.double(), base_logprobs(inputs).double()),
        "rollout_corr/kl": -d,
        "rollout_corr/logprob_abs_diff": d.abs(),
        "rollout_corr/k3": d.expm1() - d,
        "rollout_corr/ratio": ratio,
        "rollout_corr/ratio_squared": ratio.square(),
        "rollout_corr/chi2": ratio.square() - 1,
    }
