"""Estimates of KL(policy || reference) from d = logprob - reference logprob at sampled tokens.

| estimator | value | derivative by the logprob |
|---|---|---|
| `k1` | d | 1 |
| `abs` | abs(d) | sign(d) |
| `k2` | d^2 / 2 | d |
| `k3` | exp(-d) - 1 + d | 1 - exp(-d) |
| `k3_straight_through` | as k3 | d, as k2 |

Where tokens come from the policy itself, k1 and k3 are unbiased for the divergence; the derivative of k2 is
unbiased for its gradient, that of k3 is not, and that of k1 is 0 on average and moves nothing (Schulman,
"Approximating KL divergence"). d is clamped to +-20, and k3 to at most 10: one token that the reference
finds impossible would weigh 1e13 otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from opentinker.errors import invalid
from opentinker.training.limits import above, at_least
from opentinker.training.rows import Floats, Mask, Row, paired

Estimator = Literal["k1", "abs", "k2", "k3", "k3_straight_through"]

INPUT_CLAMP = 20.0
OUTPUT_CLAMP = 10.0


def estimate(
    estimator: Estimator,
    logprobs: ArrayLike,
    reference: ArrayLike,
    *,
    input_clamp: float | None = INPUT_CLAMP,
    output_clamp: float | None = OUTPUT_CLAMP,
) -> Floats:
    """Elementwise estimates, of any shape. The clamps bound d and k3 (see the module); None: no clamp."""
    d = _difference(estimator, logprobs, reference, input_clamp)
    if estimator == "k1":
        return d
    if estimator == "abs":
        return np.abs(d)
    if estimator == "k2":
        return 0.5 * d * d
    value: Floats = np.exp(-d) - 1.0 + d
    return value if output_clamp is None else np.minimum(value, output_clamp)


def gradient(
    estimator: Estimator,
    logprobs: ArrayLike,
    reference: ArrayLike,
    *,
    input_clamp: float | None = INPUT_CLAMP,
    output_clamp: float | None = OUTPUT_CLAMP,
) -> Floats:
    """The derivative of the estimates by the logprobs, elementwise.

    The clamps bound it but do not cut it off: beyond them it stays what it is at the bound. Otherwise the
    tokens farthest from the reference, from d = -2.6 on with k3, would be the ones that nothing pulls back.
    """
    d = _difference(estimator, logprobs, reference, input_clamp)
    if estimator == "k1":
        return np.ones_like(d)
    if estimator == "abs":
        return np.sign(d)
    if estimator in ("k2", "k3_straight_through"):
        return d
    slope: Floats = 1.0 - np.exp(-d)
    return slope if output_clamp is None else np.maximum(slope, -_steepest(output_clamp))


def in_reward(
    token_rewards: Sequence[Row], kl: Sequence[Row], masks: Sequence[Mask], coefficient: float
) -> list[Floats]:
    """r_t - coefficient KL_t at each token with mask 1; rewards at other tokens stay. A list of [T_i]."""
    at_least("coefficient", coefficient, 0.0)
    ones = [np.ones(len(row), dtype=np.int64) for row in token_rewards]
    return [
        rewards - coefficient * np.where(kept, values, 0.0)
        for (rewards, _), (values, kept) in zip(
            paired(token_rewards, ones, "token_rewards"), paired(kl, masks, "kl"), strict=True
        )
    ]


def centred(kl: Sequence[Row], masks: Sequence[Mask]) -> list[Floats]:
    """KL_t - mean KL over all tokens with mask 1 of the batch; 0 elsewhere. A list of [T_i].

    As an advantage, A_t - coefficient * centred_t: tokens are compared with each other, and the batch as a
    whole is neither rewarded nor blamed. Needs the whole batch.
    """
    pairs = paired(kl, masks, "kl")
    count = sum(int(kept.sum()) for _, kept in pairs)
    mean = sum(float(values[kept].sum()) for values, kept in pairs) / max(count, 1)
    return [np.where(kept, values - mean, 0.0) for values, kept in pairs]


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient that is raised while KL is above `target` and lowered while it is below.

    coefficient * (1 + clip(KL / target - 1, -0.2, 0.2) * samples / horizon) (arXiv 1909.08593). `update`
    gives the next controller; the coefficient is all its state.
    """

    coefficient: float
    target: float
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        above("coefficient", self.coefficient, 0.0)
        above("target", self.target, 0.0)
        above("horizon", self.horizon, 0.0)

    def update(self, kl: float, samples: int) -> "AdaptiveKL":
        """After a step on `samples` samples whose mean KL was `kl`."""
        if not np.isfinite(kl):
            raise invalid("kl", f"must be finite, not {kl}")
        error = float(np.clip(kl / self.target - 1.0, -0.2, 0.2))
        return replace(self, coefficient=self.coefficient * (1.0 + error * samples / self.horizon))


def _difference(
    estimator: Estimator, logprobs: ArrayLike, reference: ArrayLike, clamp: float | None
) -> Floats:
    if estimator not in get_args(Estimator):
        raise invalid("estimator", f"must be one of {', '.join(get_args(Estimator))}, not {estimator!r}")
    d: Floats = np.asarray(np.subtract(logprobs, reference, dtype=np.float64))
    return d if clamp is None else np.clip(d, -clamp, clamp)


def _steepest(bound: float) -> float:
    """exp(x) - 1 at the x > 0 where exp(x) - 1 - x = bound: how fast k3 rises when it meets its bound."""
    above("output_clamp", bound, 0.0)
    x = math.log1p(bound) + 1.0
    for _ in range(60):  # Newton from the right of a convex function: falls to the root without overshooting
        x -= (math.expm1(x) - x - bound) / math.expm1(x)
    return math.expm1(x)
