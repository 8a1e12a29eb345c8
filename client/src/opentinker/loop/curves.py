"""Draws what a run of reinforcement learning learned."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from opentinker.loop.evaluation import EvaluationResult

SMOOTHED = 5
"""Steps of the running mean."""


def plot_rewards(
    rewards: Sequence[float], evaluations: Sequence[tuple[int, EvaluationResult]], path: Path, title: str
) -> Path:
    """The mean reward of each step, its running mean, and held-out rewards with their 95 % intervals."""
    from matplotlib import pyplot

    steps = range(1, len(rewards) + 1)
    smooth = [fmean(rewards[max(0, end - SMOOTHED) : end]) for end in steps]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, rewards, alpha=0.35, label="training, each step")
    axes.plot(steps, smooth, label=f"training, mean of {SMOOTHED}")
    if evaluations:
        middle = [result.reward for _, result in evaluations]
        below = [result.reward - result.low for _, result in evaluations]
        above = [result.high - result.reward for _, result in evaluations]
        places = [step for step, _ in evaluations]
        axes.errorbar(places, middle, yerr=(below, above), marker="o", capsize=3, label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.legend(loc="upper left")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
