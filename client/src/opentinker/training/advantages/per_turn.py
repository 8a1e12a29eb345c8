"""Advantages with a number for each turn of a trajectory."""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from opentinker.errors import invalid
from opentinker.training.advantages.group_relative import grpo
from opentinker.training.advantages.groups import Members, Singleton, is_constant, members, std
from opentinker.training.rows import Floats


def grpo_per_turn(
    turn_rewards: Sequence[Sequence[float | None]],
    groups: Sequence[Hashable],
    *,
    gamma: float = 1.0,
    eps: float = 1e-6,
    ddof: int = 1,
    baseline: Literal["per_turn", "first_turn"] = "per_turn",
    singleton: Singleton = "zero",
) -> list[Floats]:
    """(G_k - mean) / (std + eps) of the discounted return G_k from turn k on; a list of [turns_i].

    "per_turn" compares turn k with turn k of the others of its group, as far as they came: the return of
    turn 3 has less left to earn than that of turn 1, so a baseline of first turns would blame late turns for
    being late. "first_turn" takes mean and std of the first turns for all (the OpenTinker paper's
    grpo_per_step). A turn for which the environment gave no reward (None) adds nothing to the return. A turn
    that only one of the group reached is a group of one. Trajectories without turns have none here.
    """
    if len(turn_rewards) != len(groups):
        raise invalid("groups", f"{len(groups)} group ids for {len(turn_rewards)} trajectories")
    if not 0 <= gamma <= 1:
        raise invalid("gamma", f"must be in [0, 1], not {gamma}")
    if baseline not in ("per_turn", "first_turn"):
        raise invalid("baseline", f"must be 'per_turn' or 'first_turn', not {baseline!r}")
    returns = [_returns(rewards, index, gamma) for index, rewards in enumerate(turn_rewards)]
    result = [np.zeros(len(each)) for each in returns]
    longest = max((len(each) for each in returns), default=0)
    for turn in range(longest if baseline == "per_turn" else min(longest, 1)):
        column = [float(each[turn]) if len(each) > turn else None for each in returns]
        standard = grpo(column, groups, eps=eps, ddof=ddof, singleton=singleton)
        for row, value in enumerate(column):
            if value is not None:
                result[row][turn] = standard[row]
        if baseline == "first_turn":
            for group in members(column, groups):
                for row in group.rows:
                    result[row] = _by_first_turns(returns[row], group, eps, ddof, singleton)
    return result


def _by_first_turns(values: Floats, group: Members, eps: float, ddof: int, singleton: Singleton) -> Floats:
    """A trajectory's returns [turns] against its group's first turns, under the rules of `grpo`."""
    if len(group.rows) == 1:
        return values / (1.0 + eps) if singleton == "raw" else np.zeros_like(values)
    if is_constant(group.values):
        return np.zeros_like(values)
    return (values - float(group.values.mean())) / (std(group.values, ddof) + eps)


def _returns(rewards: Sequence[float | None], index: int, gamma: float) -> Floats:
    """Discounted return from each turn on, [turns]."""
    result = np.zeros(len(rewards))
    running = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        reward = rewards[turn]
        if reward is not None and not np.isfinite(reward):
            raise invalid(f"turn_rewards[{index}][{turn}]", f"must be finite, not {reward}")
        running = (reward or 0.0) + gamma * running
        result[turn] = running
    return result
