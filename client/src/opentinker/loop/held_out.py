"""Playing held-out tasks: what evaluation during a run, `evaluate` and `run` share."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSpec
from opentinker.loop.evaluation import EvaluationResult, summarize
from opentinker.rollout.limits import Limits
from opentinker.rollout.opponents import Frozen
from opentinker.rollout.rollouts import Rollouts
from opentinker.rollout.seats import MAX_EPISODES
from opentinker.sampling import identity
from opentinker.sampling.params import SamplingParams
from opentinker.training.policy import Policy

DRAWN_TASKS = 64
"""How many tasks are played where the environment has no list of them."""


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
    concurrency: int = MAX_EPISODES,
    keep: bool = True,
    agents: Mapping[str, Any] | None = None,
    policies: Mapping[str, Policy] | None = None,
) -> EvaluationResult:
    """Play tasks at one version, `concurrency` episodes at once. The same seed plays the same tasks with the
    same sampling seeds. Without `keep` the result has no tokens and no text. `agents` that are not played by
    `policy` are opponents: the reward is that of the others. On the client's loop.
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
        concurrency=concurrency,
        keep=keep,
        agents=_opponents(policy, agents or {}, policies or {}),
        policies=policies,
        league=False,
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


def _opponents(policy: Policy, agents: Mapping[str, Any], policies: Mapping[str, Policy]) -> dict[str, Any]:
    """The agents with every other policy frozen as it is now."""
    opponents: dict[str, Any] = {}
    for agent, player in agents.items():
        other = policies.get(player) if isinstance(player, str) else player
        if isinstance(other, Policy) and other is not policy:
            opponents[agent] = Frozen(other, other.version)
        else:
            opponents[agent] = player
    return opponents
