"""What a benchmark prints: one JSON line with exact keys."""

import json
import math

import pytest

from benchmarks.results import Result, interval_of_median, paired


def test_a_line_has_exactly_the_agreed_keys() -> None:
    line = paired(
        "overhead", "plain_loop", [1.0, 1.2, 1.1], [1.0, 1.0, 1.0], baseline="loop", unit="s"
    ).line()
    record = json.loads(line)
    assert list(record) == ["bench", "case", "ratio", "better", "low", "high", "reps", "baseline", "raw"]
    assert record["ratio"] == pytest.approx(1.1)
    assert record["low"] <= record["ratio"] <= record["high"]
    assert record["reps"] == 3
    assert record["raw"] == {"ours_s": [1.0, 1.2, 1.1], "baseline_s": [1.0, 1.0, 1.0]}


def test_the_interval_is_the_same_on_every_run() -> None:
    values = [1.0, 5.0, 2.0, 4.0, 3.0]
    assert interval_of_median(values) == interval_of_median(values)
    assert interval_of_median([2.0] * 5) == (2.0, 2.0, 2.0)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="2 repetitions against 1"):
        paired("b", "c", [1.0, 2.0], [1.0], baseline="x", unit="s")
    with pytest.raises(ValueError, match="no repetition"):
        interval_of_median([])
    with pytest.raises(ValueError, match="not finite"):
        Result("b", "c", math.nan, "lower", 0.0, 1.0, 1, "x").line()
