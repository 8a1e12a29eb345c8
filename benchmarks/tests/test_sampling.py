"""The sampling benchmarks ask for new prompts in every repetition, the same on both sides of a pair."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import group, inference
from benchmarks.pairs import Options, measure
from benchmarks.sample_work import Side, Work, first_tokens

WORK = Work(0, 8, 8, 35, 12)


def test_prompts_depend_on_repetition_and_number_only() -> None:
    again = Work.of_line(WORK.line())
    assert again == WORK
    prompts = {
        tuple(Work(repetition, 8, 8, 35, 12).prompt(number)) for repetition in range(3) for number in range(8)
    }
    assert len(prompts) == 24
    assert all(len(prompt) == 35 and min(prompt) >= 100 for prompt in prompts)
    assert WORK.prompt(3) == again.prompt(3)
    assert (WORK.completions, WORK.tokens) == (64, 768)


def test_every_completion_has_a_seed_of_its_own() -> None:
    for work in (WORK, Work(0, 256, 1, 35, 64), Work(1, 256, 1, 35, 64)):
        seeds = {work.seed(number) + i for number in range(work.requests) for i in range(work.n)}
        assert len(seeds) == work.completions


class Answers:
    """A program that notes its lines."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def ask(self, line: str = "") -> dict[str, float]:
        self.lines.append(json.loads(line))
        return {"seconds": 1.0}


def test_a_side_never_asks_twice_for_the_same() -> None:
    program = Answers()
    side = Side(program, WORK)  # type: ignore[arg-type]
    side.seconds()
    side.first_tokens(4)
    side.seconds()
    assert [line["repetition"] for line in program.lines] == [0, 1, 2]
    assert [(line["stream"], line["new_tokens"]) for line in program.lines] == [
        (False, 12),
        (True, 4),
        (False, 12),
    ]


def test_extra_figures_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_BENCH_DIR", str(tmp_path))
    calls: list[str] = []

    def extra() -> dict[str, object]:
        calls.append("extra")
        return {"p50_s": [0.5]}

    for _ in range(2):
        result = measure(
            Options(pairs=2),
            "b",
            "c",
            lambda _: (lambda: 1.0, lambda: 2.0),
            baseline="x",
            work=10.0,
            unit="per_s",
            extra=extra,
        )
        assert result.raw == {"ours_per_s": [10.0] * 2, "baseline_per_s": [5.0] * 2, "p50_s": [0.5]}
    assert calls == ["extra"]


def test_times_to_first_tokens_are_summed_up() -> None:
    found = first_tokens([0.1] * 98 + [1.0, 3.0])
    assert found["first_token_p50_s"] == 0.1
    assert found["first_token_p99_s"] > 0.9


@pytest.mark.parametrize("bench", [group, inference])
def test_unknown_cases_are_refused(bench: Any) -> None:
    with pytest.raises(SystemExit, match="unknown case 'none'"):
        next(iter(bench.run(Options(cases=frozenset({"none"})))))
