"""Advantages with a number for each token: returns, whitening, generalized advantage estimation.

Rows are ragged: a list of arrays [T_i], entry t belongs to token t, `masks` [T_i] are 1 where the policy
sampled the token. Between its tokens lie gaps, where a tool or the environment speaks. Credit is carried over
them: a gap costs no discount and ends nothing, and a reward that arrives on a gap counts for the policy's
last token before it. `carry_over_gaps=False` treats a gap as the end of the episode, which is what others
shipped by accident.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from opentinker.errors import invalid
from opentinker.training.advantages.group_relative import dr_grpo
from opentinker.training.advantages.groups import Singleton, is_constant
from opentinker.training.rows import Floats, Mask, Row, paired

WHITENING_EPS = 1e-8
"""Added to the variance and to the counts that whitening divides by, as in verl."""


class GAE(NamedTuple):
    """Advantages [T_i] and what the value head should have said [T_i] (advantage + value), a row each."""

    advantages: list[Floats]
    returns: list[Floats]


def returns_to_go(
    token_rewards: Sequence[Row], masks: Sequence[Mask], *, gamma: float = 1.0, carry_over_gaps: bool = True
) -> list[Floats]:
    """G_t = r_t + gamma G_next, next being the policy's next token; 0 on gaps. A list of [T_i]."""
    _check_unit("gamma", gamma)
    result = []
    for rewards, mask in paired(token_rewards, masks, "token_rewards"):
        out = [0.0] * len(rewards)
        running, pending = 0.0, 0.0
        steps = enumerate(zip(rewards.tolist(), mask.tolist(), strict=True))
        for t, (reward, sampled) in reversed(list(steps)):
            if sampled:
                running = reward + pending + gamma * running
                pending = 0.0
                out[t] = running
            elif carry_over_gaps:
                pending += reward
            else:
                running = 0.0
        result.append(np.array(out))
    return result


def reinforce_plus_plus(
    token_rewards: Sequence[Row],
    masks: Sequence[Mask],
    *,
    gamma: float = 1.0,
    carry_over_gaps: bool = True,
    whitened: bool = True,
) -> list[Floats]:
    """Discounted returns, whitened over all tokens of the batch (REINFORCE++, arXiv 2501.03262). A list of
    [T_i], 0 on gaps. With `whitened` it needs the whole batch.
    """
    returns = returns_to_go(token_rewards, masks, gamma=gamma, carry_over_gaps=carry_over_gaps)
    return whiten(returns, masks) if whitened else returns


def reinforce_plus_plus_baseline(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    masks: Sequence[Mask],
    *,
    singleton: Singleton = "zero",
    whitened: bool = True,
) -> list[Floats]:
    """r - group mean on each of a trajectory's tokens, whitened over all tokens of the batch
    (REINFORCE++-baseline). A list of [T_i], 0 on gaps. With `whitened` it needs the whole batch.

    Trajectories without a reward keep 0 and take no part in the whitening.
    """
    if len(masks) != len(rewards):
        raise invalid("masks", f"{len(masks)} masks for {len(rewards)} rewards")
    centred = dr_grpo(rewards, groups, singleton=singleton)
    spread = [np.asarray(mask, dtype=np.float64) * value for mask, value in zip(masks, centred, strict=True)]
    if not whitened:
        return spread
    given = [
        mask if reward is not None else np.zeros(len(mask), dtype=int)
        for mask, reward in zip(masks, rewards, strict=True)
    ]
    return whiten(spread, given)


def gae(
    token_rewards: Sequence[Row],
    values: Sequence[Row],
    masks: Sequence[Mask],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    carry_over_gaps: bool = True,
) -> GAE:
    """A_t = delta_t + gamma lam A_next with delta_t = r_t + gamma V_next - V_t (arXiv 1506.02438).

    Next is the policy's next token, after the last one V = A = 0: what was carried over a gap stands at the
    gap's entries, which no loss reads. `carry_over_gaps=False` reads the values of gaps as if the policy had
    sampled them. Not whitened: see `whiten`.
    """
    _check_unit("gamma", gamma)
    _check_unit("lam", lam)
    advantages, returns = [], []
    for (rewards, mask), (value, _) in zip(
        paired(token_rewards, masks, "token_rewards"), paired(values, masks, "values"), strict=True
    ):
        out = [0.0] * len(rewards)
        running, next_value, pending = 0.0, 0.0, 0.0
        steps = enumerate(zip(rewards.tolist(), value.tolist(), mask.tolist(), strict=True))
        for t, (reward, here, sampled) in reversed(list(steps)):
            if sampled or not carry_over_gaps:
                delta = reward + pending + gamma * next_value - here
                running = delta + gamma * lam * running
                next_value, pending = here, 0.0
            else:
                pending += reward
            out[t] = running
        advantages.append(np.array(out))
        returns.append(advantages[-1] + value)
    return GAE(advantages, returns)


def whiten(rows: Sequence[Row], masks: Sequence[Mask]) -> list[Floats]:
    """(x - mean) / sqrt(variance + 1e-8) over all N tokens with mask 1 of all rows; 0 elsewhere.

    mean = sum(x) / (N + 1e-8), variance = sum((x - mean)^2) / (N + 1e-8) N / (N - 1), as in verl. One of each
    for the whole batch, however it is split: a part of a batch must not be whitened by itself. Equal values,
    and a single token, give 0.
    """
    pairs = list(paired(rows, masks, "rows"))
    chosen = [values[mask] for values, mask in pairs]
    pooled = np.concatenate(chosen) if chosen else np.zeros(0)
    if len(pooled) < 2 or is_constant(pooled):
        return [np.zeros(len(values)) for values, _ in pairs]
    count = len(pooled)
    mean = pooled.sum() / (count + WHITENING_EPS)
    variance = ((pooled - mean) ** 2).sum() / (count + WHITENING_EPS) * count / (count - 1)
    scale = 1.0 / np.sqrt(variance + WHITENING_EPS)
    return [np.where(mask, (values - mean) * scale, 0.0) for values, mask in pairs]


def _check_unit(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise invalid(name, f"must be in [0, 1], not {value}")
