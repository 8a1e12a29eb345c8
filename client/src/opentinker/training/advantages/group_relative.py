"""Advantages from the rewards of a group: each episode is compared with others of the same task.

Every function takes rewards [n] (None: not given) and group ids [n] and returns [n] float64, one advantage a
trajectory. Common rules: a constant group gets 0; so does a group of one, unless `singleton` is "raw";
InvalidArgument on NaN, inf and options outside what they allow.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np

from opentinker.errors import invalid
from opentinker.training.advantages.groups import (
    Members,
    Singleton,
    check_ddof,
    check_eps,
    is_constant,
    mean_of_others,
    others,
    per_group,
    std,
)
from opentinker.training.rows import Floats

_LEAST_OF_GROUP_STD = 0.5
"""The std of the others is not taken to be smaller than this part of the whole group's."""


def grpo(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Floats:
    """(r - mean) / (std + eps).

    GRPO (DeepSeekMath, arXiv 2402.03300). `eps` and `ddof` are what implementations differ in: verl 1e-6 and
    1 (a sample's std), TRL 1e-4 and 1, ART 1e-6 and 0 (the population's), OpenRLHF's group norm 1e-9 and 1.
    With `singleton` "raw" a group of one has mean 0 and std 1: r / (1 + eps), as in verl.
    """
    check_ddof(ddof)
    check_eps(eps)
    return per_group(
        rewards,
        groups,
        singleton,
        lambda group: _centred(group) / (std(group.values, ddof) + eps),
        raw_divisor=1.0 + eps,
    )


def dr_grpo(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, singleton: Singleton = "zero"
) -> Floats:
    """r - mean: no division, so that hard and easy tasks weigh by their spread (Dr. GRPO, arXiv
    2503.20783).
    """
    return per_group(rewards, groups, singleton, _centred)


def rloo(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, singleton: Singleton = "zero"
) -> Floats:
    """r - mean of the others (REINFORCE leave-one-out, arXiv 2402.14740)."""
    return per_group(rewards, groups, singleton, lambda group: group.values - mean_of_others(group.values))


def grpo_loo(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
    flat_others: Literal["group_std", "unscaled"] = "group_std",
    singleton: Singleton = "zero",
) -> Floats:
    """(r - mean of the others) / (std of the others + eps), the std with ddof 1.

    The others of an outlier may all be equal: their std is 0, or a rounding residue by which the advantage
    would be thousands. With `flat_others` "group_std" the std is never taken below half of the whole group's,
    which keeps any advantage within 2 sqrt(m) for m episodes; "unscaled" leaves r - mean undivided where the
    others are equal up to float32 noise (NeMo-RL's leave-one-out normalization).
    """
    check_eps(eps)
    if flat_others not in ("group_std", "unscaled"):
        raise invalid("flat_others", f"must be 'group_std' or 'unscaled', not {flat_others!r}")

    def formula(group: Members) -> Floats:
        values = group.values
        centred: Floats = values - mean_of_others(values)
        deviations: Floats = np.array([std(rest) for rest in others(values)], dtype=np.float64)
        divisors: Floats = np.maximum(deviations, _LEAST_OF_GROUP_STD * std(values)) + eps
        if flat_others == "unscaled":
            flat = np.array([is_constant(rest) for rest in others(values)])
            divisors = np.where(flat, 1.0, deviations + eps)
        return centred / divisors

    return per_group(rewards, groups, singleton, formula)


def maxrl(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> Floats:
    """(r - mean) / (mean + eps): the rarer success is, the more it weighs (MaxRL).

    For rewards of at least 0, as a mean near 0 or below it would turn signs: InvalidArgument on others.
    """
    check_eps(eps)
    for index, reward in enumerate(rewards):
        if reward is not None and reward < 0:
            raise invalid(f"rewards[{index}]", f"maxrl divides by the mean and needs r >= 0, not {reward}")
    return per_group(rewards, groups, singleton, lambda group: _centred(group) / (group.values.mean() + eps))


def grpo_passk(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Floats:
    """The best gets (r1 - r2) / (std + eps) over the second best, the rest 0: it is what pass@k counts
    (arXiv 2503.19595). Where two are best, r1 = r2 and all get 0.
    """
    check_ddof(ddof)
    check_eps(eps)

    def formula(group: Members) -> Floats:
        values = group.values
        order = np.argsort(-values, kind="stable")
        result = np.zeros_like(values)
        result[order[0]] = (values[order[0]] - values[order[1]]) / (std(values, ddof) + eps)
        return result

    return per_group(rewards, groups, singleton, formula)


def opo(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    *,
    singleton: Singleton = "zero",
) -> Floats:
    """r - sum(length r) / sum(length): the baseline of least variance under a length-proportional gradient
    (OPO, arXiv 2505.23585). `lengths` [n] are sampled tokens. A group that sampled none gets r - mean.
    """
    if len(lengths) != len(rewards):
        raise invalid("lengths", f"{len(lengths)} lengths for {len(rewards)} rewards")
    sizes = np.asarray(lengths, dtype=np.float64)
    if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
        raise invalid("lengths", "must be numbers of tokens, at least 0")

    def formula(group: Members) -> Floats:
        weights = sizes[group.rows]
        total = float(weights.sum())
        return group.values - (float(weights @ group.values) / total if total else float(group.values.mean()))

    return per_group(rewards, groups, singleton, formula)


def gpg(
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, singleton: Singleton = "zero"
) -> Floats:
    """(r - mean) batch / nonzero: rewards in the batch over rewards that are not 0 (GPG, arXiv 2504.02546, as
    verl counts them). Needs the whole batch.
    """
    centred = dr_grpo(rewards, groups, singleton=singleton)
    given = [reward for reward in rewards if reward is not None]
    nonzero = sum(reward != 0 for reward in given)
    return centred * (len(given) / max(nonzero, 1))


def _centred(group: Members) -> Floats:
    return group.values - float(group.values.mean())
