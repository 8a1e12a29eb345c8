"""The demo: SmolLM2-135M-Instruct learns to add and subtract by GRPO, on this machine, with every service
real.

Written with the public names only, so it reads as an example. It saves `metrics.jsonl`, `reward.png` and
`result.json` and shows answers to the same held-out problems before and after.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import opentinker as ot
from opentinker.errors import MissingDependency, Reason

MODEL = "smollm2-135m-instruct"
ENVIRONMENT = "arithmetic"
OPTIONS = {"max": 29}
"""Sums and differences of numbers from 2 to 29."""
EDGE_STEPS = 5
"""`reward_first` and `reward_last` are means over this many steps."""
LEARNING_RATE = 4e-4
"""At the first step; falls on a line to 0. Kept constant, it ends on whatever its last steps met."""
HELD_OUT = 200
SHOWN = 6


class Clock(ot.Callback):
    """Times the run from its first Sample to its last publication."""

    def __init__(self) -> None:
        self.begin: float | None = None
        self.end = 0.0

    def on_evaluation(self, step: int, result: ot.EvaluationResult) -> None:
        """The evaluation before training holds the first Sample."""
        if self.begin is None:
            self.begin = time.monotonic() - result.seconds

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step ends once its weights are published and loaded."""
        self.end = time.monotonic()


def train(*, seed: int, steps: int, out: Path, engine: str | None, clock: Clock) -> ot.FitResult:
    """The run itself: what a user would write."""
    return ot.fit(
        env=ENVIRONMENT,
        env_options=OPTIONS,
        model=MODEL,
        tuning=ot.LoRA(rank=16, alpha=32),
        algorithm=ot.GRPO(group_size=8),
        groups_per_step=8,
        steps=steps,
        learning_rate=lambda step: LEARNING_RATE * (1 - (step - 1) / steps),
        sampling=ot.SamplingParams(temperature=1.0, max_tokens=12),
        evaluation=ot.Evaluation(tasks=HELD_OUT),
        checkpoint_every=15,
        seed=seed,
        name="demo",
        run_dir=out,
        inference=ot.ServerOptions(engine=engine),
        callbacks=[clock],
        progress=True,
    )


def run_demo(
    *,
    seed: int = 0,
    steps: int = 45,
    out: Path = Path("runs/demo"),
    engine: str | None = None,
    state_dir: Any = None,
) -> dict[str, float]:
    """Train, save, show. Returns what `result.json` holds."""
    from rich.console import Console

    plot = _plotter()
    console = Console(highlight=False)
    clock = Clock()
    with ot.connect(state_dir=state_dir, progress=True):
        result = train(seed=seed, steps=steps, out=out, engine=engine, clock=clock)
        summary = summarize(result, clock)
        out.mkdir(parents=True, exist_ok=True)
        (out / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
        plot(result.rewards, out / "reward.png")
        played = ot.run(
            result.policy,
            ENVIRONMENT,
            episodes=50,
            seed=seed + 1,
            env_options=OPTIONS,
            sampling=ot.SamplingParams(temperature=1.0, max_tokens=12),
        )
        console.print(answers(result))
        console.print(
            f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, held-out "
            f"{summary['eval_before']:.3f} -> {summary['eval_after']:.3f} in {summary['seconds']:.0f} s; "
            f"played again: {played.reward:.3f} over {played.episodes} episodes",
            soft_wrap=True,
        )
        console.print(f"saved {out}/metrics.jsonl, reward.png and result.json", soft_wrap=True)
    return summary


def summarize(result: ot.FitResult, clock: Clock) -> dict[str, float]:
    """The numbers of the run."""
    rewards = result.rewards
    gaps = [
        row["rollout_corr/logprob_abs_diff"]
        for row in result.metrics
        if "rollout_corr/logprob_abs_diff" in row
    ]
    return {
        "reward_first": fmean(rewards[:EDGE_STEPS]),
        "reward_last": fmean(rewards[-EDGE_STEPS:]),
        "eval_before": result.evaluations[0][1].reward,
        "eval_after": result.evaluations[-1][1].reward,
        "steps": result.steps,
        "seconds": clock.end - (clock.begin or clock.end),
        "trainer_sampler_logprob_gap": fmean(gaps) if gaps else float("nan"),
    }


def answers(result: ot.FitResult) -> Any:
    """A table of answers to the same problems before and after training."""
    from rich.table import Table
    from rich.text import Text

    table = Table("problem", "before", "after", title="held-out problems")
    before, after = result.evaluations[0][1].groups, result.evaluations[-1][1].groups
    for first, last in list(zip(before, after, strict=True))[:SHOWN]:
        untrained, trained = first.trajectories[0], last.trajectories[0]
        task = first.task
        problem = f"{task['a']} {task['op']} {task['b']}"
        table.add_row(problem, Text(_said(untrained)), Text(_said(trained)))
    return table


def _said(trajectory: ot.Trajectory) -> str:
    text = trajectory.turns[-1].text.strip().replace("\n", " ") if trajectory.turns else "-"
    return f"{text}  {'✓' if trajectory.reward.value == 1.0 else '✗'}"


def _plotter() -> Any:
    """The function that draws the curve; asked for before minutes of training, not after."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependency(
            "the demo draws a curve and matplotlib is not installed; install it with:  "
            "pip install 'opentinker[plots]'",
            reason=Reason.MISSING_DEPENDENCY,
        ) from None
    matplotlib.use("Agg")
    return plot_rewards


def plot_rewards(rewards: Sequence[float], path: Path) -> None:
    """The mean reward of each step and its mean over the last five."""
    from matplotlib import pyplot

    smooth = [fmean(rewards[max(0, i - EDGE_STEPS + 1) : i + 1]) for i in range(len(rewards))]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rewards) + 1), rewards, alpha=0.35, label="step")
    axes.plot(range(1, len(rewards) + 1), smooth, label=f"mean of {EDGE_STEPS}")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1)
    axes.set_title("a + b and a − b, SmolLM2-135M-Instruct, GRPO")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
