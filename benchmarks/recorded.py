"""Recorded rollouts: what both sides of the `overhead` benchmark work on.

A recording holds, for each step, the prompts and how many members of each group succeeded in a real run. Both
sides sample exactly `new_tokens` tokens a completion and take the recorded rewards, so that they train on the
same number of rows of the same length whatever was sampled.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Recording:
    """What is recorded, and the precision both sides work in."""

    prompts: list[list[str]]  # [step][group]
    successes: list[list[int]]  # [step][group], members with reward 1
    group_size: int
    new_tokens: int
    micro_batch_rows: int
    sampler_dtype: str
    trainer_dtype: str
    context_tokens: int

    @property
    def groups(self) -> int:
        return len(self.prompts[0])


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step and of its parts, and the rows trained on."""

    total: float
    sample: float
    train: float
    publish: float
    rows: int


def load_recording(path: Path) -> Recording:
    return Recording(**json.loads(path.read_text()))


def member_rewards(successes: int, group_size: int) -> list[float]:
    """The first `successes` members got 1, the others 0."""
    return [1.0 if member < successes else 0.0 for member in range(group_size)]


def advantages(successes: int, group_size: int) -> list[float]:
    """(r - mean) / (std + 1e-6) with ddof 1, and 0 for a constant group."""
    rewards = member_rewards(successes, group_size)
    if successes in (0, group_size):
        return [0.0] * group_size
    mean, spread = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (spread + 1e-6) for reward in rewards]
