"""Where metrics go, and what a user may hang into the loop."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from opentinker.connection.runs import RunRecord
from opentinker.errors import invalid, unsupported

if TYPE_CHECKING:
    from opentinker.training.results import Checkpoint

METRICS_FILE = "metrics.jsonl"

LATER_LOGGERS = ("tensorboard", "wandb", "mlflow", "comet", "swanlab", "trackio")


@runtime_checkable
class Logger(Protocol):
    """Takes the metrics of each step (0: before training)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Callback:
    """Subclass it and override what is of interest. What a method raises ends the run."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """After each step."""

    def on_evaluation(self, step: int, result: Any) -> None:
        """After each evaluation: an `EvaluationResult` of fit(), a `HeldOut` of sft()."""

    def on_checkpoint(self, step: int, checkpoint: "Checkpoint") -> None:
        """After each checkpoint."""

    def on_end(self, result: Any) -> None:
        """At the end of a run that did not fail: a `FitResult` or an `SftResult`."""


class JsonlLogger:
    """One JSON object a line, flushed at once: {"step": 3, "critic/score/mean": 0.25, ...}.

    `keep_steps`: lines up to this step that the file has already are kept; by default none.
    """

    def __init__(self, path: Path, keep_steps: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if keep_steps is not None and path.exists():
            with path.open(encoding="utf-8") as lines:
                # The last line of a run that was killed may be torn.
                kept = [
                    line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= keep_steps
                ]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line; numbers that are not finite become null, for JSON has none."""
        row = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RecordLogger:
    """The run's record at the cluster."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._step = -1
        self._row: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the row in the background. The record has one row a step, so what comes for a step later is
        sent with what was there.
        """
        self._row = {**self._row, **metrics} if step == self._step else dict(metrics)
        self._step = step
        self._record.append(step, self._row)

    def close(self) -> None:
        """The record is closed with its cluster."""


def check_loggers(loggers: Sequence[Any]) -> None:
    """Refuse what is no logger, by name."""
    for logger in loggers:
        if isinstance(logger, str):
            if logger in LATER_LOGGERS:
                raise unsupported(
                    "loggers", f"{logger!r} is not in this version; metrics are in {METRICS_FILE}"
                )
            raise invalid(
                "loggers", f"unknown logger {logger!r}; give objects with log(step, metrics) and close()"
            )
        if not isinstance(logger, Logger):
            raise invalid("loggers", f"{logger!r} has no log(step, metrics) and close()")


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse what is no callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise invalid("callbacks", f"{callback!r} is no opentinker.Callback")
