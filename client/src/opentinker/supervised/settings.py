"""What `sft()` can be told, checked before anything is started."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from opentinker.errors import InvalidArgument, Reason, invalid, unsupported
from opentinker.loop.algorithms import Schedule
from opentinker.supervised.batches import BatchSize
from opentinker.supervised.data import Row
from opentinker.supervised.encoding import RewrittenHistory, TooLong, TrainOn, check_choices
from opentinker.training import schedules
from opentinker.training.tuning import AdamW, JobOptions, ServerOptions, Tuning

LEARNING_RATE = 1e-4
BATCH_ROWS = 16
CLIP_NORM = 1.0

Decay = Literal["none", "linear", "cosine"]

REFUSED = {
    "packing": "the trainer lays rows end to end without attention between them as its own settings say, and "
    "results do not depend on it; batch_tokens fills steps by tokens",
    "truncation": 'rows are never cut; too_long="drop" leaves long ones out and counts them',
    "max_steps": "it is called steps",
    "num_epochs": "it is called epochs",
}
"""What other libraries call things, and options that would change nothing here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `sft()` was told, with defaults filled in and rows read."""

    rows: Sequence[Row]
    held_out: Sequence[Row]
    model: str
    tuning: Tuning
    epochs: int | None
    steps: int | None
    batch: BatchSize
    learning_rate: Schedule
    warmup: int
    decay: Decay
    optimizer: AdamW
    evaluation_every: int | None
    train_on: TrainOn
    rewritten_history: RewrittenHistory
    max_tokens: int | None
    too_long: TooLong
    shuffle: bool
    seed: int
    name: str
    run_dir: Path | None
    loggers: Sequence[Any]
    callbacks: Sequence[Any]
    checkpoint_every: int | None
    from_checkpoint: str
    resume: str
    trainer: ServerOptions | None
    inference: ServerOptions | None
    job: JobOptions | None
    serve: bool
    stop_after_skipped: int
    progress: bool | None

    def __post_init__(self) -> None:
        if not isinstance(self.tuning, Tuning):
            raise invalid("tuning", f"{self.tuning!r} is none of LoRA(...) and Full(...)")
        if not isinstance(self.optimizer, AdamW):
            raise invalid("optimizer", f"{self.optimizer!r} is no AdamW(...)")
        if self.epochs is not None and self.steps is not None:
            raise invalid("steps", "give epochs or steps, one of the two")
        check_choices(self.train_on, self.rewritten_history, self.too_long)
        for name, least in (
            ("epochs", 1),
            ("steps", 1),
            ("evaluation_every", 1),
            ("checkpoint_every", 1),
            ("max_tokens", 2),
            ("stop_after_skipped", 1),
            ("warmup", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise invalid(name, f"must be at least {least}, not {value}")
        if self.decay not in ("none", "linear", "cosine"):
            raise invalid("decay", f"must be 'none', 'linear' or 'cosine', not {self.decay!r}")
        if callable(self.learning_rate):
            if self.warmup or self.decay != "none":
                raise invalid("learning_rate", "a function says it all; leave out warmup and decay")
        elif not (math.isfinite(self.learning_rate) and self.learning_rate >= 0):
            raise invalid("learning_rate", f"must be a finite number of at least 0, not {self.learning_rate}")
        if self.resume and self.from_checkpoint:
            raise invalid("resume", "a run that is resumed starts from its own checkpoint")
        if self.resume and not self.resume.startswith("runs/"):
            raise invalid("resume", f"must be the name of a run, runs/..., not {self.resume!r}")

    def schedule(self, steps: int) -> Schedule:
        """The learning rate of a run of so many steps."""
        rate = self.learning_rate
        if callable(rate) or (self.decay == "none" and not self.warmup):
            return rate
        # A run shorter than its warm-up never decays.
        warmup = min(self.warmup, steps)
        if self.decay == "linear":
            return schedules.Linear(rate, steps, warmup)
        if self.decay == "cosine":
            return schedules.Cosine(rate, steps, warmup)
        return schedules.Constant(rate, warmup)

    def optimizer_at(self, rate: Schedule, step: int) -> AdamW:
        """The optimizer of a step (1, 2, 3 ...)."""
        return replace(self.optimizer, lr=rate(step) if callable(rate) else rate)

    def describe(self) -> dict[str, Any]:
        """As JSON values, for the record of the run."""
        rate = self.learning_rate
        return {
            "kind": "sft",
            "model": self.model,
            "rows": len(self.rows),
            "held_out_rows": len(self.held_out),
            "learning_rate": getattr(rate, "__name__", repr(rate)) if callable(rate) else rate,
            "tuning": _plain(self.tuning),
            "batch": _plain(self.batch),
            "optimizer": _plain(self.optimizer),
            **{
                name: getattr(self, name)
                for name in (
                    "epochs",
                    "steps",
                    "warmup",
                    "decay",
                    "evaluation_every",
                    "checkpoint_every",
                    "from_checkpoint",
                    "train_on",
                    "rewritten_history",
                    "max_tokens",
                    "too_long",
                    "shuffle",
                    "seed",
                )
            },
        }

    def lasting(self) -> dict[str, Any]:
        """What must be the same when a run is resumed: all that decides what a step learns from."""
        names = ("model", "tuning", "batch", "train_on", "rewritten_history", "shuffle", "seed")
        described = self.describe()
        return {name: described[name] for name in names}


def refuse_unknown(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """UnsupportedOption or InvalidArgument for names that `sft()` does not have."""
    for name in options:
        if name in REFUSED:
            raise unsupported(name, REFUSED[name])
        raise InvalidArgument(
            f"sft() has no option {name!r}; it has {', '.join(sorted(known))}",
            reason=Reason.INVALID_FIELD,
            field=name,
        )


def _plain(value: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"name": type(value).__name__}
    for each in fields(value):
        item = getattr(value, each.name)
        described[each.name] = list(item) if isinstance(item, tuple | list) else item
    return described
