"""Rewards shaped by length. What groups are judged by (`zero_variance`) stays the raw reward."""

from collections.abc import Hashable, Sequence

import numpy as np

from opentinker.errors import invalid
from opentinker.training.advantages.groups import members
from opentinker.training.rows import Floats


def overlong_penalty(
    lengths: Sequence[int], *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Floats:
    """[n], to be added to the rewards: 0 up to max - buffer tokens, then falling on a line to -factor at
    `max_tokens` and beyond (soft overlong punishment, DAPO, arXiv 2503.14476).
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise invalid("buffer_tokens", f"must be in [1, max_tokens = {max_tokens}], not {buffer_tokens}")
    if not (np.isfinite(factor) and factor >= 0):
        raise invalid("factor", f"must be a finite number of at least 0, not {factor}")
    over = np.asarray(lengths, dtype=np.float64) - (max_tokens - buffer_tokens)
    return 0.0 - np.clip(over / buffer_tokens, 0.0, 1.0) * factor


def length_penalty(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    *,
    weight: float = 0.5,
) -> list[float | None]:
    """r - weight * solved * length / longest within each group, a reward each (None stays None).

    `solved` is the group's mean reward, at least 0: brevity counts for more the better a task is mastered,
    and not at all while nothing is (prime-rl's penalty on output tokens).
    """
    if len(lengths) != len(rewards):
        raise invalid("lengths", f"{len(lengths)} lengths for {len(rewards)} rewards")
    sizes = np.asarray(lengths, dtype=np.float64)
    if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
        raise invalid("lengths", "must be numbers of tokens, at least 0")
    result: list[float | None] = [None] * len(rewards)
    for group in members(rewards, groups):
        relative = sizes[group.rows] / max(sizes[group.rows].max(), 1.0)
        shaped = group.values - weight * max(group.values.mean(), 0.0) * relative
        for row, value in zip(group.rows, shaped.tolist(), strict=True):
            result[row] = value
    return result
