"""What a run of reinforcement learning came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.loop.curves import plot_rewards
from opentinker.loop.evaluation import EvaluationResult
from opentinker.supervised.result import plotter
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint


@dataclass(frozen=True, slots=True)
class FitResult:
    """What a run came to. `policy` can be used while its cluster is open; its versions and checkpoints
    stay.
    """

    policy: Policy
    run: str
    run_dir: Path
    steps: int
    """Optimizer steps taken."""
    metrics: list[dict[str, float]] = field(repr=False)
    """One row a step."""
    evaluations: list[tuple[int, EvaluationResult]] = field(repr=False)
    """(step, result), step 0 before training."""
    checkpoint: Checkpoint | None = None
    """The last one saved."""
    stopped: str = ""
    """Why it ended before its last step, if it did."""
    critic: Policy | None = None
    """The critic's own policy, where the algorithm has one."""
    policies: Mapping[str, Policy] = field(default_factory=dict, repr=False)
    """All that were trained, by name; `policy` is the first of them."""

    @property
    def version(self) -> int:
        """The newest published version."""
        return self.policy.version

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [row["critic/score/mean"] for row in self.metrics if "critic/score/mean" in row]

    @property
    def summary(self) -> str:
        """The held-out rewards before and after, in a few words."""
        if not self.evaluations:
            return f"{self.steps} steps, no evaluation"
        (_, before), (_, after) = self.evaluations[0], self.evaluations[-1]
        return (
            f"held-out reward {before.reward:.3f} [{before.low:.3f}, {before.high:.3f}] -> "
            f"{after.reward:.3f} [{after.low:.3f}, {after.high:.3f}] "
            f"on {after.tasks} tasks in {self.steps} steps"
        )

    def plot(self, path: str | Path, title: str = "") -> Path:
        """Draw training and held-out rewards into a PNG. MissingDependency without matplotlib."""
        plotter()
        return plot_rewards(self.rewards, self.evaluations, Path(path), title or self.policy.base_model)
