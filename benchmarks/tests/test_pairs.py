"""Pairs that a run takes up where the one before it stopped, and the rows both sides train on."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks import pairs
from benchmarks.pairs import Options, Unfinished, forget, measure
from benchmarks.train_rows import equal_rows, ragged_rows, read_rows, write_rows
from benchmarks.train_trl import GROUP, MICRO_BATCH_ROWS, recorded_rows
from benchmarks.trainer import run


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPENTINKER_BENCH_DIR", str(tmp_path))
    return tmp_path / "b-c.json"


class Clock:
    """Sides that take 2 s and 3 s, and what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def ours(self) -> float:
        self.calls.append("ours")
        return 2.0

    def theirs(self) -> float:
        self.calls.append("theirs")
        return 3.0

    def result(self, options: Options, *, warm_up: bool = False) -> dict[str, object]:
        def sides(_stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
            return self.ours, self.theirs

        line = measure(
            options, "b", "c", sides, baseline="x", work=12.0, unit="per_s", warm_up=warm_up
        ).line()
        parsed: dict[str, object] = json.loads(line)
        return parsed


def test_faster_is_higher_and_the_order_alternates(notes: Path) -> None:
    clock = Clock()
    result = clock.result(Options(pairs=3), warm_up=True)
    assert (result["ratio"], result["better"], result["reps"]) == (1.5, "higher", 3)
    assert result["raw"] == {"ours_per_s": [6.0] * 3, "baseline_per_s": [4.0] * 3}
    warmed = clock.calls[2:]
    assert warmed == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    # A finished case is not measured again before all of them are finished.
    assert clock.result(Options(pairs=3)) == result
    assert len(clock.calls) == 8
    forget("b", ["c"])
    assert not notes.exists()


def test_an_unfinished_case_goes_on(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with pytest.raises(Unfinished, match="b/c: 1 of 3 pairs"):
        clock.result(Options(pairs=3, budget_s=-1.0))
    with pytest.raises(Unfinished, match="2 of 3"):
        clock.result(Options(pairs=3, budget_s=-1.0))
    assert clock.result(Options(pairs=3, budget_s=-1.0))["reps"] == 3
    assert clock.calls.count("ours") == 3
    # Pairs of other code do not count.
    monkeypatch.setattr(pairs, "_digest", lambda measured: "other")
    with pytest.raises(Unfinished, match="1 of 3"):
        clock.result(Options(pairs=3, budget_s=-1.0))


def test_rows_are_what_the_issue_says_and_always_the_same(tmp_path: Path) -> None:
    rows = ragged_rows()
    lengths = [len(row.token_ids) for row in rows]
    assert len(rows) == 64
    assert max(lengths) <= 1024
    assert 70 < sum(lengths) / 64 < 170
    assert rows == ragged_rows()
    assert {len(row.token_ids) for row in equal_rows()} == {128}
    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == rows


def test_recorded_rollouts_are_whole_groups_with_advantages() -> None:
    rows = recorded_rows()
    assert len(rows) % GROUP == len(rows) % MICRO_BATCH_ROWS == 0
    for row in rows:
        assert row.logprobs is not None
        assert len(row.token_ids) == len(row.loss_mask) == len(row.logprobs)
        assert row.loss_mask[0] == 0
        assert row.advantage != 0.0
    groups = [rows[at : at + GROUP] for at in range(0, len(rows), GROUP)]
    assert all(abs(sum(row.advantage for row in group)) < 1e-9 for group in groups)


def test_unknown_cases_are_refused() -> None:
    with pytest.raises(SystemExit, match="unknown case 'none'"):
        next(iter(run(Options(cases=frozenset({"none"})))))
