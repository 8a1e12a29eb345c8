"""The losses that the trainer computes, as plain numpy in float64: forward values of one row.

They are the oracle of the trainer's tests, and what a custom loss can be built from and compared with. Every
function takes arrays [T] of one row (elementwise ones: any shape) and returns per-token losses of that shape.
`old` are the logprobs that the ratio r = exp(logprob - old) is taken to: the proximal ones, or the sampler's.
Losses of a sequence need its `mask`, and stand at each of its tokens, so that `seq_mean_token_mean` counts a
sequence once. `aggregation` makes one number of them; ratios are bounded by e^20 as in the trainer.

    losses = [ppo(*row, dual_clip=3.0) for row in rows]
    aggregate("token_mean", masks).total(losses, masks)
"""

import numpy as np
from numpy.typing import ArrayLike

from opentinker.training.limits import above, at_least, ordered, within
from opentinker.training.off_policy import LOG_RATIO_CLAMP, token_ratio
from opentinker.training.rows import Floats, Mask


def importance_sampling(logprobs: ArrayLike, old: ArrayLike, advantages: ArrayLike) -> Floats:
    """-r A."""
    return -token_ratio(logprobs, old) * _floats(advantages)


def ppo(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Floats:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) (arXiv 1707.06347); where A < 0 at most -c A with
    c = `dual_clip` > 1 (arXiv 1912.09729).
    """
    within("clip_low", clip_low, 0.0, 1.0)
    at_least("clip_high", clip_high, 0.0)
    if dual_clip is not None:
        above("dual_clip", dual_clip, 1.0)
    return _surrogate(token_ratio(logprobs, old), _floats(advantages), clip_low, clip_high, dual_clip)


def gspo(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    mask: Mask,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Floats:
    """PPO's surrogate with one ratio a sequence, exp(mean log r) (GSPO, arXiv 2507.18071); 0 at mask 0."""
    within("clip_low", clip_low, 0.0, 1.0)
    at_least("clip_high", clip_high, 0.0)
    log_ratio, kept = _log_ratio(logprobs, old), np.asarray(mask, dtype=bool)
    ratio = np.exp(log_ratio[kept].mean()) if kept.any() else 1.0
    losses = _surrogate(np.full(kept.shape, ratio), _floats(advantages), clip_low, clip_high, None)
    return np.where(kept, losses, 0.0)


def cispo(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    *,
    ratio_min: float = 0.8,
    ratio_max: float = 1.28,
) -> Floats:
    """-clamp(r, ratio_min, ratio_max) A logprob, the ratio without gradient (arXiv 2506.13585).

    Bounds are ratios. verl's and others' clip ranges 0.2 and 0.28 are 0.8 and 1.28 here; TRL's epsilon_high
    of 5.0 is (0, 5).
    """
    ordered("ratio_min", ratio_min, "ratio_max", ratio_max)
    weights = np.clip(token_ratio(logprobs, old), ratio_min, ratio_max)
    return -weights * _floats(advantages) * _floats(logprobs)


def sapo(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Floats:
    """-sigmoid(tau (r - 1)) 4 / tau A, tau by the sign of A (SAPO, arXiv 2511.20347)."""
    above("tau_positive", tau_positive, 0.0)
    above("tau_negative", tau_negative, 0.0)
    gains = _floats(advantages)
    tau = np.where(gains > 0, tau_positive, tau_negative)
    gate: Floats = _sigmoid(tau * (token_ratio(logprobs, old) - 1.0)) * 4.0 / tau
    return -gate * gains


def gmpo(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    mask: Mask,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Floats:
    """-A times the geometric mean of the sequence's clipped ratios (GMPO, arXiv 2507.20673); 0 at mask 0.

    log r is clipped to [-clip_low, clip_high] where that lowers the objective, as in PPO: from above where
    A > 0, from below where A < 0; it counts as 0 where A = 0.
    """
    at_least("clip_low", clip_low, 0.0)
    at_least("clip_high", clip_high, 0.0)
    log_ratio, gains, kept = _log_ratio(logprobs, old), _floats(advantages), np.asarray(mask, dtype=bool)
    sign = np.sign(gains)
    pessimistic = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -clip_low, clip_high))
    ratio = np.exp(pessimistic[kept].mean()) if kept.any() else 1.0
    return np.where(kept, -gains * ratio, 0.0)


def dppo_tv(
    logprobs: ArrayLike,
    old: ArrayLike,
    advantages: ArrayLike,
    *,
    delta_low: float = 0.15,
    delta_high: float = 0.15,
    ratio_max: float = 20.0,
) -> Floats:
    """-min(r, ratio_max) A logprob where the token's probability has not moved the way A wants by more than
    delta, 0 elsewhere; no gradient through the ratio (DPPO, total variation).
    """
    at_least("delta_low", delta_low, 0.0)
    at_least("delta_high", delta_high, 0.0)
    above("ratio_max", ratio_max, 0.0)
    now, gains = _floats(logprobs), _floats(advantages)
    moved = np.exp(now) - np.exp(_floats(old))
    beyond = ((gains > 0) & (moved > delta_high)) | ((gains < 0) & (moved < -delta_low))
    losses = -np.minimum(token_ratio(now, old), ratio_max) * gains * now
    return np.where(beyond, 0.0, losses)


def dro(logprobs: ArrayLike, old: ArrayLike, advantages: ArrayLike, *, beta: float = 0.1) -> Floats:
    """-logprob A + beta / 2 (logprob - old)^2 (direct reward optimization, arXiv 2405.19107)."""
    at_least("beta", beta, 0.0)
    now = _floats(logprobs)
    return -now * _floats(advantages) + 0.5 * beta * (now - _floats(old)) ** 2


def cross_entropy(logprobs: ArrayLike, weights: ArrayLike = 1.0) -> Floats:
    """-w logprob, weights of any sign."""
    return -_floats(weights) * _floats(logprobs)


def value(
    values: ArrayLike, returns: ArrayLike, old_values: ArrayLike | None = None, *, clip: float | None = None
) -> Floats:
    """(v - R)^2 / 2; with `clip` the worse of it and of v kept within clip of `old_values`."""
    now, target = _floats(values), _floats(returns)
    error = (now - target) ** 2
    if clip is not None:
        above("clip", clip, 0.0)
        if old_values is None:
            raise TypeError("a clipped value loss needs old_values")
        before = _floats(old_values)
        error = np.maximum(error, (np.clip(now, before - clip, before + clip) - target) ** 2)
    return 0.5 * error


def _surrogate(ratio: Floats, gains: Floats, low: float, high: float, dual_clip: float | None) -> Floats:
    worst = np.maximum(-ratio * gains, -np.clip(ratio, 1.0 - low, 1.0 + high) * gains)
    if dual_clip is not None:
        worst = np.where(gains < 0, np.minimum(worst, -dual_clip * gains), worst)
    return worst


def _log_ratio(logprobs: ArrayLike, old: ArrayLike) -> Floats:
    return np.clip(_floats(logprobs) - _floats(old), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
