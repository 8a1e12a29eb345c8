"""The use cases run from end to end on one embedded stack: a tiny random model plays, is trained, is measured
on held-out tasks and leaves a plot. It learns nothing in so few steps.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import opentinker as ot
from scripts import use_cases
from scripts.evidence_cases import Progress
from scripts.evidence_cases.maths_with_python import CASE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that name a stack which all examples of this module use."""
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as cluster:
        yield {"OPENTINKER_ADDRESS": cluster.address, "OPENTINKER_API_KEY": cluster.control.key or ""}


@pytest.mark.parametrize(
    ("example", "plot", "options"),
    [
        ("maths", "reward.png", ("--max-tokens", "8")),
        ("maths_with_python", "reward.png", ("--max-tokens", "16")),
        ("gomoku", "wins.png", ("--play", "script")),
        ("gomoku", "wins.png", ("--play", "itself")),
        ("gomoku", "wins.png", ("--play", "past")),
        ("household", "reward.png", ("--turns", "3")),
        ("customer_service", "reward.png", ("--turns", "3")),
        ("phone", "reward.png", ("--turns", "3")),
        ("geometry", "reward.png", ("--size", "3", "--kinds", "count")),
    ],
    ids=[
        "maths",
        "maths_with_python",
        "gomoku",
        "gomoku_itself",
        "gomoku_past",
        "household",
        "customer_service",
        "phone",
        "geometry",
    ],
)
def test_use_case(
    stack: dict[str, str],
    tmp_path: Path,
    tiny_model_dir: Path,
    tiny_vision_model_dir: Path,
    example: str,
    plot: str,
    options: tuple[str, ...],
) -> None:
    chosen = tiny_vision_model_dir if example == "geometry" else tiny_model_dir
    model = ("--model", str(chosen), "--engine", "transformers")
    small = ("--steps", "2", "--groups", "1", "--tasks", "3", "--out", str(tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{example}.py"), *model, *small, *options],
        cwd=tmp_path,
        env={**os.environ, **stack, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"held-out reward (\S+) \[.*\] -> (\S+) \[.*\] on (\d+) tasks", done.stdout)
    assert found is not None, done.stdout
    assert found[3] == "3"
    assert all(0 <= float(reward) <= 1 for reward in found.groups()[:2])
    assert (tmp_path / "out" / plot).read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]


def test_evidence(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untrained, warmed up on demonstrations that call a tool, reinforced from that checkpoint."""
    monkeypatch.setattr(use_cases, "MODEL", str(tiny_model_dir))
    monkeypatch.setattr(use_cases, "ENGINE", "transformers")
    monkeypatch.setattr(use_cases, "ROOT", tmp_path)
    monkeypatch.setattr(use_cases, "PLOTS", tmp_path / "docs" / "evidence")
    monkeypatch.setattr("examples.maths_with_python.HELD_OUT", 4)
    case = replace(CASE, demonstrations=32, steps=2, groups=1, max_tokens=8, samples=1, limits=None)
    found = use_cases.learned(use_cases.measure(case, Progress(tmp_path / "kept", "abc"), seeds=(3,)))
    assert found["untrained"]["tasks"] == 4
    (seed,) = found["seeds"].values()
    assert seed["sft_loss_last"] < seed["sft_loss_first"]
    assert (seed["tasks"], len(seed["rewards"])) == (4, 2)
    assert math.isclose(seed["gain"], seed["held_out_after"] - seed["held_out_before"], abs_tol=1e-9)
    assert (tmp_path / seed["plot"]).read_bytes().startswith(b"\x89PNG")
    json.dumps(found)
