"""Using a trained policy: `run` plays it, `evaluate` measures it."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSpec
from opentinker.errors import invalid
from opentinker.loop.evaluation import EvaluationResult
from opentinker.rollout.limits import Limits
from opentinker.rollout.seats import MAX_EPISODES
from opentinker.rollout.trajectory import Trajectory
from opentinker.sampling.params import SamplingParams
from opentinker.training.policy import Policy
from opentinkerapi.runtime.tracing import traced


@dataclass(frozen=True, slots=True)
class RunResult:
    """Episodes that were played. `reward` is the mean over those that have one, [low, high] its 95 %
    interval.
    """

    reward: float
    low: float
    high: float
    episodes: int
    excluded: int
    trajectories: tuple[Trajectory, ...] = field(repr=False, default=())


def run(policy: Policy, env: EnvironmentSpec, *, episodes: int = 50, **options: Any) -> RunResult:
    """Play episodes with a policy and block until they have ended. Options as `run_async`."""
    return policy.portal.run(_run(policy, env, episodes, options))


def run_async(
    policy: Policy, env: EnvironmentSpec, *, episodes: int = 50, **options: Any
) -> Awaitable[RunResult]:
    """Play episodes with a policy: the tasks of the split "test" where there is one, otherwise drawn from
    `seed`.

    Options: sampling, limits, seed, env_options, split, version, concurrency, keep, agents.
    """
    return policy.portal.bridge(_run(policy, env, episodes, options))


def evaluate(policy: Policy, env: EnvironmentSpec, **options: Any) -> EvaluationResult:
    """Measure a policy on held-out tasks and block until it is done. Options as `evaluate_async`."""
    return policy.portal.run(_evaluate(policy, env, **options))


def evaluate_async(policy: Policy, env: EnvironmentSpec, **options: Any) -> Awaitable[EvaluationResult]:
    """Measure a policy on held-out tasks at one pinned version.

    Options: samples (episodes of each task), tasks (a list, or how many), split, sampling, limits, seed,
    env_options, version; concurrency (how many episodes are played at once, 256 unless told otherwise);
    keep=False (the result has rewards, ends and numbers of the episodes, and no tokens and no text: for more
    episodes than fit into memory); agents (who plays which of the agents that the environment names, as in
    `fit()`: another Policy, at its newest version, `ot.Frozen`, `ot.OpponentPool` or a function; the
    reward is that of the agents that `policy` plays).
    """
    return policy.portal.bridge(_evaluate(policy, env, **options))


@traced("run")
async def _run(policy: Policy, env: EnvironmentSpec, episodes: int, options: Mapping[str, Any]) -> RunResult:
    if episodes < 1:
        raise invalid("episodes", f"must be at least 1, not {episodes}")
    if unknown := set(options) & {"samples", "tasks"}:
        raise invalid(sorted(unknown)[0], "is an option of evaluate(), not of run()")
    result = await _evaluate(policy, env, samples=1, tasks=episodes, **options)
    trajectories = tuple(trajectory for group in result.groups for trajectory in group.trajectories)
    return RunResult(result.reward, result.low, result.high, len(trajectories), result.excluded, trajectories)


async def _evaluate(
    policy: Policy,
    env: EnvironmentSpec,
    *,
    samples: int = 1,
    tasks: int | Sequence[Task] | None = None,
    split: str = "test",
    sampling: SamplingParams | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    env_options: Mapping[str, Any] | None = None,
    version: int | None = None,
    concurrency: int = MAX_EPISODES,
    keep: bool = True,
    agents: Mapping[str, Any] | None = None,
) -> EvaluationResult:
    # Loaded when something is played: who imports the package does not wait for it.
    from opentinker.loop.held_out import play_held_out

    return await play_held_out(
        policy,
        env,
        samples=samples,
        tasks=tasks,
        split=split,
        params=sampling,
        limits=limits,
        seed=seed,
        options=env_options,
        version=version,
        concurrency=concurrency,
        keep=keep,
        agents=agents,
    )
