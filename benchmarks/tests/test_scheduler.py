"""Figures of the scheduler's benchmark, on queues that can be worked out by hand."""

import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.queue_math import Work, jain, makespan, percentile, strict_fifo


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 3.0]) == pytest.approx(0.8)


def test_percentiles() -> None:
    values = [float(number) for number in range(1, 101)]
    assert percentile(values, 0.99) == 99.0
    assert percentile(values, 0.5) == 50.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_strict_queue_lets_nobody_pass() -> None:
    trace = [Work(2, 10.0), Work(4, 5.0), Work(1, 1.0), Work(1, 1.0, submit=30.0)]
    # The second needs all four slots and waits for the first; the third, which would fit, waits behind it.
    assert strict_fifo(trace, 4) == [0.0, 10.0, 15.0, 30.0]
    assert makespan(trace, strict_fifo(trace, 4)) == 31.0


def test_a_size_is_refused_where_there_is_one_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overhead", "--scale", "0.5"]) == 2
    assert "no --scale" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_cluster_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "scheduler", "--case", "small_wait", "--scale", "0.05"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert '"case": "small_wait"' in done.stdout
