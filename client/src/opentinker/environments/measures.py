"""Numbers that an environment reports about an episode, and how those of many episodes become one."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from opentinker.environments.errors import InvalidEpisodeData

Kind = Literal["mean", "sum", "max", "min"]
KINDS: tuple[Kind, ...] = ("mean", "sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Metric:
    """A number. `weight`: how much it counts in a mean, the number of tries behind a rate for example."""

    value: float
    weight: float = 1.0
    kind: Kind = "mean"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidEpisodeData(f"a metric's kind is {', '.join(KINDS)}, not {self.kind!r}")
        for name in ("value", "weight"):
            number = getattr(self, name)
            if isinstance(number, str | bytes) or not hasattr(number, "__float__"):
                raise InvalidEpisodeData(f"a metric's {name} must be a number, not {number!r}")
            object.__setattr__(self, name, float(number))
            if not math.isfinite(getattr(self, name)):
                raise InvalidEpisodeData(f"a metric's {name} is {number}; it must be finite")
        if self.weight < 0:
            raise InvalidEpisodeData(f"a metric's weight must not be negative, not {self.weight}")

    @classmethod
    def of(cls, value: Any) -> "Metric":
        """From what `metrics()` may give, or from `plain`."""
        if isinstance(value, Metric):
            return value
        if isinstance(value, Mapping):
            return cls(**value)
        return cls(value)

    def plain(self) -> Any:
        """As a JSON value: the number alone where the rest goes without saying."""
        if self.weight == 1.0 and self.kind == "mean":
            return self.value
        return {"value": self.value, "weight": self.weight, "kind": self.kind}


def read_metrics(given: object) -> dict[str, "float | Metric"]:
    """What `metrics()` gave, or a wire brought. InvalidEpisodeData."""
    if not isinstance(given, Mapping):
        raise InvalidEpisodeData(f"metrics must be a dict, not {type(given).__name__}")
    read = {str(name): Metric.of(value) for name, value in given.items()}
    return {name: metric.value if metric == Metric(metric.value) else metric for name, metric in read.items()}


def plain_metrics(metrics: Mapping[str, "float | Metric"]) -> dict[str, Any]:
    """As a JSON object."""
    return {name: Metric.of(value).plain() for name, value in metrics.items()}


def joined(episodes: Iterable[Mapping[str, "float | Metric"]]) -> dict[str, float]:
    """One number for each name and kind, as NAME/KIND. A mean whose weights are all 0 is left out."""
    found: dict[tuple[str, Kind], list[Metric]] = {}
    for metrics in episodes:
        for name, value in metrics.items():
            metric = Metric.of(value)
            found.setdefault((name, metric.kind), []).append(metric)
    result = {}
    for (name, kind), values in sorted(found.items()):
        weight = sum(each.weight for each in values)
        if kind != "mean":
            result[f"{name}/{kind}"] = _FOLDS[kind](each.value for each in values)
        elif weight:
            result[f"{name}/mean"] = sum(each.value * each.weight for each in values) / weight
    return result


_FOLDS: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
