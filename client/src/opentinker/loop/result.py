"""What a run of reinforcement learning came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.loop.evaluation import EvaluationResult
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
