"""How good a policy is: held-out tasks at a pinned version, a mean with its 95 % interval."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSpec
from opentinker.rollout.agent_loop import Limits
from opentinker.rollout.rollouts import Rollouts
from opentinker.rollout.trajectory import Group
from opentinker.sampling import identity
from opentinker.sampling.params import SamplingParams
from opentinker.training.policy import Policy

DRAWN_TASKS = 64
"""How many tasks are played where the environment has no list of them."""

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


async def play_held_out(
    policy: Policy,
    env: EnvironmentSpec,
    *,
    samples: int = 1,
    tasks: int | Sequence[Task] | None = None,
    split: str = "test",
    params: SamplingParams | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    version: int | None = None,
    scope: str | None = None,
) -> EvaluationResult:
    """Play tasks at one version. The same seed plays the same tasks with the same sampling seeds. On the
    client's loop.
    """
    started = time.monotonic()
    rollouts = Rollouts(
        policy,
        env,
        groups=1,
        group_size=samples,
        params=params,
        limits=limits,
        # Training draws its environments and samples from the seed itself; these never meet them.
        seed=identity.seed(seed, "held-out"),
        options=options,
        split=split,
        shuffle=False,
        version=policy.version if version is None else version,
        scope=scope or uuid.uuid4().hex,
    )
    try:
        given = None if tasks is None or isinstance(tasks, int) else tasks
        if given is not None:
            await rollouts.use(given)
        listed = await rollouts.size()
        wanted = tasks if isinstance(tasks, int) else (listed or DRAWN_TASKS)
        batch = await rollouts.next_batch(min(wanted, listed) if listed else wanted)
    finally:
        await rollouts.close()
    return summarize(batch.groups, samples, batch.version, time.monotonic() - started)


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
