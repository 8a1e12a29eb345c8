"""Advantages from the rewards of groups. Groups are formed by id, never by position.

All sums are float64 and two-pass, whatever the type of the rewards. A reward of None was not given: it is
not 0, takes no part in its group's statistics and gets the advantage 0.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import invalid

Advantage = Callable[[Sequence[float | None], Sequence[Hashable]], NDArray[np.float64]]
"""From rewards [n] and group ids [n] to advantages [n]."""

SPREAD_ULPS = 4.0
"""Rewards that differ by less than this many float32 steps are equal: they were computed differently, not
earned.
"""


def grpo(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Literal["zero", "raw"] = "zero",
) -> NDArray[np.float64]:
    """(r - mean) / (std + eps) within each group, [n] float64.

    `ddof` 1 is the sample's standard deviation (verl, TRL), 0 the population's. A constant group gets 0. A
    group of one has nothing to be compared with: "zero" gives 0, "raw" the reward itself. ValueError on NaN
    or inf.
    """
    if ddof not in (0, 1):
        raise invalid("ddof", f"must be 0 or 1, not {ddof}")
    if not eps >= 0:
        raise invalid("eps", f"must be at least 0, not {eps}")
    if singleton not in ("zero", "raw"):
        raise invalid("singleton", f"must be 'zero' or 'raw', not {singleton!r}")
    result = np.zeros(len(rewards), dtype=np.float64)
    for indices in members(rewards, groups).values():
        values = np.array([rewards[index] for index in indices], dtype=np.float64)
        if len(indices) == 1:
            result[indices] = values if singleton == "raw" else 0.0
        elif not is_constant(values):
            centred = values - values.mean()
            std = np.sqrt((centred**2).sum() / (len(values) - ddof))
            result[indices] = centred / (std + eps)
    return result


def members(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The rows of each group that have a reward, in order of first appearance. ValueError if one is not
    finite.
    """
    if len(rewards) != len(groups):
        raise invalid("groups", f"{len(groups)} group ids for {len(rewards)} rewards")
    found: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not np.isfinite(reward):
            raise invalid(f"rewards[{index}]", f"must be finite, not {reward}")
        found.setdefault(group, []).append(index)
    return found


def is_constant(values: NDArray[np.float64]) -> bool:
    """Whether rewards are equal up to float32 noise, so that a mean that is off by a rounding makes no
    credit.
    """
    spread = float(values.max() - values.min())
    scale = max(float(np.abs(values).max()), float(np.finfo(np.float32).tiny))
    return spread <= SPREAD_ULPS * float(np.finfo(np.float32).eps) * scale
