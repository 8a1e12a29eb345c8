"""What a run of supervised tuning came to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker.errors import MissingDependency, Reason
from opentinker.supervised.held_out import HeldOut
from opentinker.training.policy import Policy
from opentinker.training.results import Checkpoint


@dataclass(frozen=True, slots=True)
class SftResult:
    """`policy` can be used while its cluster is open, as in `ot.run(result.policy, env)`; its published
    version and its checkpoints stay.
    """

    policy: Policy
    run: str
    run_dir: Path
    steps: int
    """Optimizer steps taken."""
    metrics: list[dict[str, float]] = field(repr=False)
    """One row a step of this call."""
    evaluations: list[tuple[int, HeldOut]]
    """(step, held-out loss), step 0 before training."""
    data: dict[str, float] = field(repr=False)
    """What became of the rows of the data set: `data/rows`, `data/dropped_too_long` and so on."""
    checkpoint: Checkpoint | None = None
    """The last one saved."""

    @property
    def version(self) -> int:
        """The published version."""
        return self.policy.version

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [row["train/loss"] for row in self.metrics]

    @property
    def held_out(self) -> HeldOut | None:
        """The last held-out loss, if there was evaluation data."""
        return self.evaluations[-1][1] if self.evaluations else None

    def plot(self, path: str | Path, title: str = "") -> Path:
        """Draw the losses into a PNG. MissingDependency without matplotlib."""
        plotter()
        return plot_losses(
            [row["training/global_step"] for row in self.metrics],
            self.losses,
            [(step, result.loss) for step, result in self.evaluations],
            Path(path),
            title or self.policy.base_model,
        )


def plotter() -> Any:
    """matplotlib, set up to draw files; for asking before a run rather than after it."""
    try:
        import matplotlib
    except ImportError:
        raise MissingDependency(
            "curves are drawn with matplotlib, which is not installed; install it with:  "
            "pip install 'opentinker[plots]'",
            reason=Reason.MISSING_DEPENDENCY,
        ) from None
    matplotlib.use("Agg")
    return matplotlib


def plot_losses(
    steps: Sequence[float],
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    path: Path,
    title: str,
) -> Path:
    """Training loss by step, and held-out losses at theirs."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(steps, losses, alpha=0.5, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), marker="o", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(loc="upper right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
