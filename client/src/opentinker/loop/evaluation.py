"""How good a policy is: held-out tasks at a pinned version, a mean with its 95 % interval."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from opentinker.rollout.trajectory import Group

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean reward over tasks, each the mean over its samples.

    `low` and `high` bound the 95 % interval of the mean, from the spread between tasks. What has no reward
    is not counted as 0: it is left out, and `excluded` says how many.
    """

    reward: float
    low: float
    high: float
    tasks: int
    samples: int
    excluded: int
    version: int
    seconds: float
    environment: str
    groups: tuple[Group, ...] = field(repr=False, default=())

    @property
    def summary(self) -> str:
        """In a few words."""
        return f"reward {self.reward:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.tasks} tasks"

    def metrics(self) -> dict[str, float]:
        """As metrics, under verl's names."""
        prefix = f"val-core/{self.environment}/reward"
        return {
            f"{prefix}/mean@{self.samples}": self.reward,
            f"{prefix}/low95@{self.samples}": self.low,
            f"{prefix}/high95@{self.samples}": self.high,
            f"val-aux/{self.environment}/tasks": float(self.tasks),
            f"val-aux/{self.environment}/excluded": float(self.excluded),
            "timing_s/testing": self.seconds,
        }


def summarize(groups: Sequence[Group], samples: int, version: int, seconds: float) -> EvaluationResult:
    """The mean over groups and its interval."""
    means = np.array([np.mean(group.rewards) for group in groups if group.rewards], dtype=np.float64)
    reward = float(means.mean()) if means.size else float("nan")
    half = Z95 * float(means.std(ddof=1)) / float(np.sqrt(means.size)) if means.size > 1 else float("nan")
    episodes = sum(len(group.trajectories) for group in groups)
    return EvaluationResult(
        reward=reward,
        low=reward - half,
        high=reward + half,
        tasks=int(means.size),
        samples=samples,
        excluded=episodes - sum(len(group.rewards) for group in groups),
        version=version,
        seconds=seconds,
        environment=groups[0].id.rsplit("/", 1)[0] if groups else "",
        groups=tuple(groups),
    )
