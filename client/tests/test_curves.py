"""What a run says of itself at the end: its rewards drawn, and in a few words."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import opentinker as ot

BEFORE = ot.EvaluationResult(0.25, 0.2, 0.3, 40, 2, 0, 0, 1.0, "game")
AFTER = ot.EvaluationResult(0.75, 0.7, 0.8, 40, 2, 0, 3, 1.0, "game")


def result(rewards: list[float], *evaluations: tuple[int, ot.EvaluationResult]) -> ot.FitResult:
    policy: Any = SimpleNamespace(base_model="tiny")
    rows = [{"critic/score/mean": reward} for reward in rewards]
    return ot.FitResult(policy, "runs/r", Path("runs/r"), len(rows), rows, list(evaluations))


def test_rewards_are_drawn(tmp_path: Path) -> None:
    run = result([0.1, 0.2, 0.5, 0.6, 0.7, 0.8], (0, BEFORE), (6, AFTER))
    path = run.plot(tmp_path / "plots" / "a.png", "A game")
    assert path == tmp_path / "plots" / "a.png"
    drawn = path.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    # What was held out is in the picture, and nothing is needed to draw one.
    assert result([0.1, 0.2]).plot(tmp_path / "b.png").read_bytes() != drawn
    assert result([]).plot(tmp_path / "c.png").exists()


def test_one_evaluation_without_an_interval_is_drawn(tmp_path: Path) -> None:
    alone = ot.EvaluationResult(0.5, float("nan"), float("nan"), 1, 1, 0, 0, 1.0, "game")
    assert result([0.5], (0, alone)).plot(tmp_path / "a.png").exists()


def test_in_a_few_words() -> None:
    said = result([0.1] * 3, (0, BEFORE), (3, AFTER)).summary
    assert said == "held-out reward 0.250 [0.200, 0.300] -> 0.750 [0.700, 0.800] on 40 tasks in 3 steps"
    assert result([0.1]).summary == "1 steps, no evaluation"
