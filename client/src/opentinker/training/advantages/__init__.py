"""Advantages: how much better an action was than what it is compared with. numpy, float64, no torch.

`group_relative`: one number a trajectory, from rewards and group ids. `per_token`, `per_turn`: one number a
token or turn. `penalties`: rewards shaped by length. `estimators`: one way to call them all.
"""

from opentinker.training.advantages.estimators import (
    Advantage,
    AdvantageInputs,
    Estimates,
    estimate,
    needs_whole_batch,
)
from opentinker.training.advantages.group_relative import (
    dr_grpo,
    gpg,
    grpo,
    grpo_loo,
    grpo_passk,
    maxrl,
    opo,
    rloo,
)
from opentinker.training.advantages.groups import SPREAD_ULPS, Singleton, is_constant, members, zero_variance
from opentinker.training.advantages.penalties import length_penalty, overlong_penalty
from opentinker.training.advantages.per_token import (
    GAE,
    gae,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    returns_to_go,
    whiten,
)
from opentinker.training.advantages.per_turn import grpo_per_turn

__all__ = [
    "GAE",
    "SPREAD_ULPS",
    "Advantage",
    "AdvantageInputs",
    "Estimates",
    "Singleton",
    "dr_grpo",
    "estimate",
    "gae",
    "gpg",
    "grpo",
    "grpo_loo",
    "grpo_passk",
    "grpo_per_turn",
    "is_constant",
    "length_penalty",
    "maxrl",
    "members",
    "needs_whole_batch",
    "opo",
    "overlong_penalty",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "returns_to_go",
    "rloo",
    "whiten",
    "zero_variance",
]
