"""What a benchmark reports, and how paired runs are summed up."""

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a benchmark's output.

    `ratio` is ours over `baseline` (or, where there is none, the measured figure itself); `low` and `high`
    are the ends of its 95 % interval over `reps` repetitions. `raw` holds the figures behind it, by name.
    """

    bench: str
    case: str
    ratio: float
    better: Literal["lower", "higher"]
    low: float
    high: float
    reps: int
    baseline: str
    raw: Mapping[str, object] = field(default_factory=dict)

    def line(self) -> str:
        for name in ("ratio", "low", "high"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{self.bench}/{self.case}: {name} is not finite")
        record = {
            "bench": self.bench,
            "case": self.case,
            "ratio": round(self.ratio, 4),
            "better": self.better,
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "reps": self.reps,
            "baseline": self.baseline,
            "raw": dict(self.raw),
        }
        return json.dumps(record, ensure_ascii=False)


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the median of `values` and its 95 % bootstrap interval, the same on every run."""
    if not values:
        raise ValueError("no repetition was measured")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def paired(
    bench: str,
    case: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    baseline: str,
    unit: str,
    better: Literal["lower", "higher"] = "lower",
) -> Result:
    """The ratio ours/theirs of interleaved repetitions: entries i of both were measured back to back."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} repetitions against {len(theirs)}")
    ratio, low, high = interval_of_median([mine / other for mine, other in zip(ours, theirs, strict=True)])
    raw = {f"ours_{unit}": list(ours), f"baseline_{unit}": list(theirs)}
    return Result(bench, case, ratio, better, low, high, len(ours), baseline, raw)
