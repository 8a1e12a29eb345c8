"""Groups of rewards: formed by id, never by position; what is missing, alone or constant.

All sums are float64 and two-pass, whatever the type of the rewards. A reward of None was not given: it is
not 0, takes no part in its group's statistics and gets the advantage 0.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import invalid
from opentinker.training.rows import Floats

Singleton = Literal["zero", "raw"]
"""What a group of one gets, as nothing can be compared with it: 0, or the reward itself."""

SPREAD_ULPS = 4.0
"""Rewards that differ by less than this many float32 steps are equal: they were computed differently, not
earned.
"""


@dataclass(frozen=True, slots=True)
class Members:
    """The rows of one group that have a reward: `rows` [m] and their `values` [m]."""

    rows: list[int]
    values: Floats


def members(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[Members]:
    """The groups of a batch of n, in order of first appearance; those without any reward are left out.

    InvalidArgument if there is not one group id a reward, or a reward is not finite.
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
    return [
        Members(rows, np.array([rewards[row] for row in rows], dtype=np.float64)) for rows in found.values()
    ]


def is_constant(values: Floats) -> bool:
    """Whether values are equal up to float32 noise, so that a mean that is off by a rounding makes no
    credit.
    """
    spread = float(values.max() - values.min())
    scale = max(float(np.abs(values).max()), float(np.finfo(np.float32).tiny))
    return spread <= SPREAD_ULPS * float(np.finfo(np.float32).eps) * scale


def zero_variance(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> NDArray[np.bool_]:
    """[n] bool: which rows are in a group of two or more whose rewards are all equal, so that it teaches
    nothing.

    Give it the raw rewards. A length penalty makes every group vary, the solved ones too, and a filter on
    shaped rewards would keep them all.
    """
    result = np.zeros(len(rewards), dtype=bool)
    for group in members(rewards, groups):
        result[group.rows] = len(group.rows) > 1 and is_constant(group.values)
    return result


def per_group(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    singleton: Singleton,
    formula: Callable[[Members], Floats],
    *,
    raw_divisor: float = 1.0,
) -> Floats:
    """Apply `formula` (m members to [m] advantages) to each group with two rewards that differ.

    Constant groups get 0 and groups of one what `singleton` says, so a formula never divides by nothing.
    `raw_divisor` is what "raw" divides the reward by.
    """
    if singleton not in ("zero", "raw"):
        raise invalid("singleton", f"must be 'zero' or 'raw', not {singleton!r}")
    result = np.zeros(len(rewards), dtype=np.float64)
    for group in members(rewards, groups):
        if len(group.rows) == 1:
            result[group.rows] = group.values / raw_divisor if singleton == "raw" else 0.0
        elif not is_constant(group.values):
            result[group.rows] = formula(group)
    return result


def std(values: Floats, ddof: int = 1) -> float:
    """Standard deviation, two-pass; 0 of fewer than ddof + 1 values."""
    if len(values) <= ddof:
        return 0.0
    centred = values - values.mean()
    return float(np.sqrt((centred**2).sum() / (len(values) - ddof)))


def mean_of_others(values: Floats) -> Floats:
    """[m]: for each value the mean of the others; of m >= 2 values."""
    return (float(values.sum()) - values) / (len(values) - 1)


def others(values: Floats) -> Iterator[Floats]:
    """For each value the array of the others."""
    return (np.delete(values, index) for index in range(len(values)))


def check_eps(eps: float) -> None:
    """InvalidArgument unless it is a number of at least 0."""
    if not eps >= 0:
        raise invalid("eps", f"must be at least 0, not {eps}")


def check_ddof(ddof: int) -> None:
    """InvalidArgument unless it is 0 (of the population) or 1 (of a sample)."""
    if ddof not in (0, 1):
        raise invalid("ddof", f"must be 0 or 1, not {ddof}")
