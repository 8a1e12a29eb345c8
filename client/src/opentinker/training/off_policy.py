"""Off-policy corrections: what becomes of w = exp(proximal logprob - behavior logprob).

The proximal policy is the trainer's own before the update, the behavior policy the sampler's engine. The two
differ by numerics, and by versions where rollouts are asynchronous. These are the formulas that the trainer
applies, for one row [T] (or any shape, where no sequence is involved); `mismatch` says how bad it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from opentinker.errors import invalid
from opentinker.training.limits import above, ordered
from opentinker.training.rows import Floats, Mask, Row, paired

LOG_RATIO_CLAMP = 20.0
"""exp of more says nothing but "far away" and soon overflows."""


def token_ratio(proximal: ArrayLike, behavior: ArrayLike) -> Floats:
    """w of each token, elementwise; its logarithm is clamped to +-20."""
    log_ratio = np.subtract(proximal, behavior, dtype=np.float64)
    return np.asarray(np.exp(np.clip(log_ratio, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)))


def sequence_ratio(proximal: Row, behavior: Row, mask: Mask) -> float:
    """The product of w over the tokens of a row with mask 1."""
    return float(
        np.exp(np.clip(_log_ratio(proximal, behavior, mask).sum(), -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    )


def geometric_ratio(proximal: Row, behavior: Row, mask: Mask) -> float:
    """The geometric mean of w over the tokens of a row with mask 1; 1 of a row without any."""
    log_ratio = _log_ratio(proximal, behavior, mask)
    return float(np.exp(log_ratio.mean())) if log_ratio.size else 1.0


def truncate(ratios: ArrayLike, high: float) -> Floats:
    """min(w, high): truncated importance sampling, of token or sequence ratios."""
    above("high", high, 0.0)
    return np.minimum(np.asarray(ratios, dtype=np.float64), high)


def mask_outside(ratios: ArrayLike, low: float, high: float) -> Floats:
    """w where it lies in [low, high], 0 elsewhere: IcePop of token ratios, masked importance sampling of
    sequence ratios. What is masked stays in the loss's denominator.
    """
    ordered("low", low, "high", high)
    values = np.asarray(ratios, dtype=np.float64)
    return np.where((values >= low) & (values <= high), values, 0.0)


def geometric_mask(
    proximal: Row,
    behavior: Row,
    mask: Mask,
    *,
    low: float,
    high: float,
    token_high: float | None = None,
) -> Floats:
    """[T]: the token's w, at most `token_high`, if the row's geometric mean lies in [low, high]; else all 0.

    Without `token_high` one token of thousands may weigh e^20 and hide in the mean.
    """
    ordered("low", low, "high", high)
    ratios = token_ratio(proximal, behavior)
    if token_high is not None:
        ratios = truncate(ratios, token_high)
    return ratios * float(low <= geometric_ratio(proximal, behavior, mask) <= high)


def batch_norm_factor(weights: Sequence[Row], masks: Sequence[Mask]) -> float:
    """The mean of (truncated) weights over all tokens with mask 1: divided by it, the weights of the batch
    are 1 on average and leave the size of the step alone. Needs the whole batch. 1 if there is no weight.
    """
    pairs = paired(weights, masks, "weights")
    count = sum(int(kept.sum()) for _, kept in pairs)
    mean = sum(float(values[kept].sum()) for values, kept in pairs) / max(count, 1)
    return mean if mean > 0 else 1.0


def opsm(
    advantages: Sequence[float],
    logprobs: Sequence[Row],
    behavior: Sequence[Row],
    masks: Sequence[Mask],
    *,
    delta: float,
) -> tuple[Floats, Floats]:
    """Off-policy sequence masking: (keep [n] of 0 and 1, KL [n]).

    Kept is a sequence with A >= 0, or whose mean of behavior - current logprob is at most `delta`: the policy
    has not left it, so that pushing it down still means something (DeepSeek-V3.2). `logprobs` are the
    policy's now, not the proximal ones.
    """
    if len(advantages) != len(masks):
        raise invalid("advantages", f"{len(advantages)} for {len(masks)} sequences")
    divergence = np.array(
        [
            -float(values.mean()) if (values := _log_ratio(now, then, mask)).size else 0.0
            for now, then, mask in zip(logprobs, behavior, masks, strict=True)
        ]
    )
    keep = (np.asarray(advantages, dtype=np.float64) >= 0) | (divergence <= delta)
    return keep.astype(np.float64), divergence


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the proximal policy is from the behavior policy, over all tokens with mask 1."""

    tokens: int
    mean_abs: float
    """Mean of abs(log w)."""
    k1: float
    """Mean of -log w, an estimate of KL(behavior || proximal)."""
    k3: float
    """Mean of w - 1 - log w, the same with less variance and never negative."""
    chi2: float
    """Mean of w^2, less 1."""
    ess: float
    """mean(w)^2 / mean(w^2): the part of the tokens that the weighted batch is worth."""


def mismatch(proximal: Sequence[Row], behavior: Sequence[Row], masks: Sequence[Mask]) -> Mismatch:
    """Statistics of w over a batch. Without any token: as if the policies were the same."""
    logs = [_log_ratio(now, then, mask) for now, then, mask in zip(proximal, behavior, masks, strict=True)]
    log_ratio = np.concatenate(logs) if logs else np.zeros(0)
    if log_ratio.size == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0, 1.0)
    ratio = np.exp(log_ratio)
    return Mismatch(
        tokens=int(log_ratio.size),
        mean_abs=float(np.abs(log_ratio).mean()),
        k1=float(-log_ratio.mean()),
        k3=float((ratio - 1.0 - log_ratio).mean()),
        chi2=float((ratio**2).mean() - 1.0),
        ess=float(ratio.mean() ** 2 / (ratio**2).mean()),
    )


def _log_ratio(now: Row, then: Row, mask: Mask) -> Floats:
    """Clamped log ratios at the tokens with mask 1, [m]."""
    (new, kept), (old, _) = paired([now], [mask], "logprobs")[0], paired([then], [mask], "logprobs")[0]
    return np.clip(new[kept] - old[kept], -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
