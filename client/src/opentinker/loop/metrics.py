"""The metrics of a step. One table: docs/metrics.md lists the names; they are verl's where verl has one."""

from collections.abc import Iterable, Sequence

import numpy as np

from opentinker.rollout.trajectory import Batch
from opentinker.sampling.params import StopReason
from opentinker.training.results import ForwardBackwardResult, StepResult
from opentinker.training.samples import TrainSamples


def of_batch(batch: Batch, trainer_version: int) -> dict[str, float]:
    """What was played: rewards, lengths, turns, environment numbers, staleness, time."""
    trajectories = list(batch)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    rewards = batch.rewards
    clipped = sum(turn.stop_reason is StopReason.LENGTH for turn in turns)
    ages = [
        trainer_version - version
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
        "staleness/mean": float(np.mean(ages)) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "env/seconds": sum(trajectory.env_seconds for trajectory in trajectories),
        "env/replays": float(sum(trajectory.replays for trajectory in trajectories)),
        "tokens/sampled": float(sampled),
        "tokens/prompt": float(total - sampled),
        "perf/total_num_tokens": float(total),
        "timing_s/gen": batch.seconds,
        "timing_s/engine_gen": batch.engine_seconds,
    }
    names = {name for trajectory in trajectories for name in trajectory.metrics}
    for name in sorted(names):
        values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        metrics[f"env/{name}/mean"] = float(np.mean(values))
    return metrics


def of_update(
    samples: TrainSamples, gradient: ForwardBackwardResult, update: StepResult, learning_rate: float
) -> dict[str, float]:
    """What was learned: losses, KL, gradient, and how far trainer and sampler are apart."""
    metrics = {name: value.mean for name, value in gradient.metrics.items()}
    ratio, squared = (
        gradient.metrics.get("rollout_corr/ratio"),
        gradient.metrics.get("rollout_corr/ratio_squared"),
    )
    if ratio is not None and squared is not None and squared.mean > 0:
        metrics["rollout_corr/ess"] = ratio.mean**2 / squared.mean
    for name, part in gradient.components.items():
        metrics.setdefault(f"loss/{name}", part.mean)
    metrics |= {name: value.mean for name, value in update.metrics.items()}
    return metrics | {
        "actor/grad_norm": update.grad_norm,
        "actor/lr": learning_rate,
        "training/optimizer_step": float(update.step),
        "training/nonfinite_skips": float(update.consecutive_skips),
        "tokens/loss": float(samples.loss_tokens),
        "tokens/trained": float(gradient.trained_tokens),
        "rows/total": float(len(samples)),
        "rows/trained": float(sum(not sample.inert for sample in samples)),
    }


def spread(name: str, values: Sequence[float] | Iterable[float]) -> dict[str, float]:
    """mean, max and min; nothing where there is nothing."""
    array = np.asarray(list(values), dtype=np.float64)
    if not array.size:
        return {}
    return {
        f"{name}/mean": float(array.mean()),
        f"{name}/max": float(array.max()),
        f"{name}/min": float(array.min()),
    }
