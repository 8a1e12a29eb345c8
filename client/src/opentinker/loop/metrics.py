"""The metrics of a step. One table: docs/metrics.md lists the names; they are verl's where verl has one."""

from collections.abc import Mapping, Sequence

import numpy as np

from opentinker.environments import measures
from opentinker.environments.types import AGENT
from opentinker.rollout.trajectory import Batch
from opentinker.sampling.completion import StopReason
from opentinker.training.results import ForwardBackwardResult, Metrics, StepResult, Sum
from opentinker.training.samples import TrainSamples
from opentinker.training.spread import spread


def of_batch(batch: Batch, newest: Mapping[str, int]) -> dict[str, float]:
    """What was played: rewards, lengths, turns, environment numbers, staleness, time. `newest` are the
    versions of the trained policies by name.
    """
    trajectories = list(batch)
    # What is an episode's is counted once, however many agents it had.
    episodes = list({trajectory.episode: trajectory for trajectory in trajectories}.values())
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    rewards = batch.rewards
    clipped = sum(turn.stop_reason is StopReason.LENGTH for turn in turns)
    ages = [
        newest[trajectory.policy] - version
        for trajectory in trajectories
        for segment in trajectory.segments
        for _, _, version in segment.spans
    ]
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    total = sum(len(segment.token_ids) for trajectory in trajectories for segment in trajectory.segments)
    metrics = {
        **spread("critic/score", rewards),
        **spread("response_length", [turn.completion_tokens for turn in turns]),
        **spread("prompt_length", [turn.prompt_tokens for turn in turns]),
        **spread("num_turns", [len(trajectory.turns) for trajectory in trajectories]),
        "response/clip_ratio": clipped / len(turns) if turns else 0.0,
        "actions/illegal": sum(each.illegal_actions for each in trajectories) / max(len(turns), 1),
        "actions/malformed_calls": sum(each.malformed_calls for each in trajectories) / max(len(turns), 1),
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "env/seconds": sum(episode.env_seconds for episode in episodes),
        "env/replays": float(sum(episode.replays for episode in episodes)),
        "tokens/sampled": float(sampled),
        "tokens/prompt": float(total - sampled),
        "perf/total_num_tokens": float(total),
        "timing_s/gen": batch.seconds,
        "timing_s/engine_gen": batch.engine_seconds,
    }
    numbers = measures.joined(episode.metrics for episode in episodes)
    metrics |= {f"env/{name}": value for name, value in numbers.items()}
    return metrics | _of_components(batch) | _of_agents(batch)


def _of_components(batch: Batch) -> dict[str, float]:
    """The named parts of the rewards that count."""
    parts = [trajectory.reward.components for trajectory in batch if trajectory.counts]
    return {f"reward/{name}": value for name, value in measures.joined(parts).items()}


def _of_agents(batch: Batch) -> dict[str, float]:
    """The rewards of each agent that has a name: their mean over all agents of a game says nothing."""
    rewards: dict[str, list[float]] = {}
    for trajectory in batch:
        if trajectory.agent != AGENT and trajectory.counts and trajectory.reward.value is not None:
            rewards.setdefault(trajectory.agent, []).append(trajectory.reward.value)
    return {
        name: value
        for agent in sorted(rewards)
        for name, value in spread(f"agents/{agent}/score", rewards[agent]).items()
    }


def of_update(
    samples: TrainSamples,
    gradients: Sequence[ForwardBackwardResult],
    updates: Sequence[StepResult],
    learning_rate: float,
) -> dict[str, float]:
    """What was learned: losses, KL, gradient, and how far trainer and sampler are apart, over all optimizer
    steps on the batch. Sums and weights are added before the mean is taken, so it is one of tokens.
    """
    totals = added([gradient.metrics for gradient in gradients])
    metrics = {name: value.mean for name, value in totals.items()}
    ratio, squared = totals.get("rollout_corr/ratio"), totals.get("rollout_corr/ratio_squared")
    if ratio is not None and squared is not None and squared.mean > 0:
        metrics["rollout_corr/ess"] = ratio.mean**2 / squared.mean
    for name, part in added([gradient.components for gradient in gradients]).items():
        metrics.setdefault(f"loss/{name}", part.mean)
    metrics |= {
        "tokens/loss": float(samples.loss_tokens),
        "tokens/trained": float(sum(gradient.trained_tokens for gradient in gradients)),
        "rows/total": float(len(samples)),
        "rows/trained": float(sum(not sample.inert for sample in samples)),
        "timing_s/engine_update_actor": engine_seconds(gradients, updates),
    }
    if not updates:
        return metrics
    metrics |= {name: value.mean for name, value in added([update.metrics for update in updates]).items()}
    return metrics | {
        "actor/grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "actor/lr": learning_rate,
        "actor/updates": float(len(updates)),
        "training/optimizer_step": float(updates[-1].step),
        "training/nonfinite_skips": float(updates[-1].consecutive_skips),
    }


def of_critic(
    gradients: Sequence[ForwardBackwardResult], updates: Sequence[StepResult], learning_rate: float
) -> dict[str, float]:
    """What a critic with a policy of its own learned. What its trainer says of the policy's logprobs is left
    out: they are nobody's.
    """
    totals = added([gradient.metrics for gradient in gradients])
    metrics = {
        name: value.mean for name, value in totals.items() if name.startswith(("critic/", "loss/value"))
    }
    for name, part in added([gradient.components for gradient in gradients]).items():
        metrics.setdefault(f"loss/{name}", part.mean)
    return metrics | {
        "critic/grad_norm": float(np.mean([update.grad_norm for update in updates])),
        "critic/lr": learning_rate,
        "critic/nonfinite_skips": float(updates[-1].consecutive_skips),
        "timing_s/engine_update_critic": engine_seconds(gradients, updates),
    }


def of_values(samples: TrainSamples) -> dict[str, float]:
    """What the critic said of the batch before it learned from it, and what it should have said."""
    masks = [np.asarray(row.loss_mask, dtype=bool) for row in samples]
    values, returns = (
        np.concatenate(
            [
                np.asarray(getattr(row, name), dtype=np.float64)[mask]
                for row, mask in zip(samples, masks, strict=True)
            ]
        )
        for name in ("old_values", "returns")
    )
    variance = float(returns.var())
    explained = 1.0 - float((returns - values).var()) / variance if variance else 0.0
    return {
        **spread("critic/values", values),
        **spread("critic/returns", returns),
        "critic/vf_explained_var": explained,
    }


def engine_seconds(gradients: Sequence[ForwardBackwardResult], updates: Sequence[StepResult]) -> float:
    """Time inside the engine process."""
    return sum(each.engine_seconds for each in gradients) + sum(each.engine_seconds for each in updates)


def added(results: Sequence[Metrics]) -> dict[str, Sum]:
    """Sums and weights of several results, by name."""
    totals: dict[str, Sum] = {}
    for result in results:
        for name, value in result.items():
            known = totals.get(name, Sum(0.0, 0.0))
            totals[name] = Sum(known.sum + value.sum, known.weight + value.weight)
    return totals
