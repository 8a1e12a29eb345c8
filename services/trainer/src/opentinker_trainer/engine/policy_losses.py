"""Losses that move a policy along advantages. Tensors are [N], in float32 or float64.

r = exp(logprob - base), base being the proximal policy's logprobs where samples have them, the sampler's
where they do not. A loss of a sequence gives each of its tokens the same factor; with weights 1 / length and
the number of sequences as denominator its sum is the mean over sequences.
"""

import torch
from torch import Tensor

from opentinker_trainer.domain.losses import (
    Cispo,
    DppoTv,
    Dro,
    Gmpo,
    Gspo,
    ImportanceSampling,
    PolicyLoss,
    Ppo,
    Sapo,
)
from opentinker_trainer.engine.token_inputs import (
    TokenInputs,
    TokenMetrics,
    base_logprobs,
    given,
    graft,
    log_ratio,
)

CLIPPED = "actor/pg_clipfrac"
CLIPPED_LOWER = "actor/pg_clipfrac_lower"


def policy_losses(loss: PolicyLoss, logprobs: Tensor, inputs: TokenInputs) -> tuple[Tensor, TokenMetrics]:
    """The loss of each token, differentiable, and where a bound acted."""
    advantages = given(inputs.advantages)
    base = base_logprobs(inputs)
    d = log_ratio(logprobs, base)
    match loss:
        case ImportanceSampling():
            return -d.exp() * advantages, {}
        case Ppo(clip_low, clip_high, dual_clip):
            return clipped_surrogate(d.exp(), advantages, clip_low, clip_high, dual_clip)
        case Gspo(clip_low, clip_high):
            return _gspo(logprobs, d, inputs, clip_low, clip_high)
        case Cispo(ratio_min, ratio_max):
            return weighted_logprob(d.exp(), ratio_min, ratio_max, advantages, logprobs)
        case Sapo(tau_positive, tau_negative):
            return _sapo(d.exp(), advantages, tau_positive, tau_negative), {}
        case Gmpo(clip_low, clip_high):
            return _gmpo(d, inputs, clip_low, clip_high)
        case DppoTv(delta_low, delta_high, ratio_max):
            near = probability_is_near(logprobs, base, advantages, delta_low, delta_high)
            ratio = d.detach().exp().clamp(max=ratio_max)
            return -ratio * near * advantages * logprobs, {CLIPPED: ~near & (advantages != 0)}
        case Dro(beta):
            # Liang et al. 2024, direct reward optimization; unbounded, since the square is the bound.
            return -logprobs * advantages + 0.5 * beta * (logprobs - base).square(), {}


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, TokenMetrics]:
    """max(-r A, -clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017), at most -dual A where A < 0 (Ye et
    al. 2020).
    """
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    worst = torch.maximum(plain, clipped)
    metrics: TokenMetrics = {CLIPPED: clipped > plain}
    if dual is not None:
        bounded = torch.minimum(worst, -advantages * dual)
        negative = advantages < 0
        metrics[CLIPPED_LOWER] = (worst > bounded) & negative
        worst = torch.where(negative, bounded, worst)
    return worst, metrics


def weighted_logprob(
    ratio: Tensor, low: float, high: float, advantages: Tensor, logprobs: Tensor
) -> tuple[Tensor, TokenMetrics]:
    """-sg(clamp(r, low, high)) A logprob (CISPO, MiniMax-M1 2025): a bounded weight, no token without
    gradient.
    """
    free = ratio.detach()
    weight = free.clamp(low, high)
    return -weight * advantages * logprobs, {CLIPPED: weight != free}


def probability_is_near(
    logprobs: Tensor, base: Tensor, advantages: Tensor, low: float, high: float
) -> Tensor:
    """Whether the token's probability rose by at most `high` where A > 0, fell by at most `low` elsewhere."""
    rise = (logprobs.exp() - base.exp()).detach()
    return torch.where(advantages > 0, rise <= high, -rise <= low)


def chosen(condition: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    """[N]: `one` where the condition holds, `other` elsewhere, in the precision of `like`."""
    return torch.where(condition, like.new_tensor(one), like.new_tensor(other))


def _gspo(
    logprobs: Tensor, d: Tensor, inputs: TokenInputs, low: float, high: float
) -> tuple[Tensor, TokenMetrics]:
    """Group sequence policy optimization (Zheng et al. 2025), in the form for advantages of tokens: each
    token is moved by its own advantage. Where the advantages of a sequence are equal, that is the gradient of
    the sequence's surrogate.
    """
    mean = inputs.sequence_means(d.detach())
    ratio = graft(logprobs, mean, torch.ones_like(mean)).exp()
    return clipped_surrogate(ratio, given(inputs.advantages), low, high, None)


def _sapo(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> Tensor:
    """Soft adaptive policy optimization (2025): at r = 1 its slope is that of r A."""
    tau = chosen(advantages > 0, tau_positive, tau_negative, ratio)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


def _gmpo(d: Tensor, inputs: TokenInputs, low: float, high: float) -> tuple[Tensor, TokenMetrics]:
    """Geometric-mean policy optimization (Zhao et al. 2025): each log ratio is clipped where it goes too far
    along its advantage, then the sequence has one ratio, exp of their mean.
    """
    advantages = given(inputs.advantages)
    sign = advantages.sign()
    clipped = d.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * d, sign * clipped)
    ratio = inputs.sequence_means(pessimistic).exp()
    return -advantages * ratio, {CLIPPED: sign * clipped < sign * d}
