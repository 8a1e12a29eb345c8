"""The examples run: on the embedded stack, with a tiny model that learns nothing in so few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(tmp_path: Path, *arguments: str) -> str:
    """What an example prints."""
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
    environment.pop("OPENTINKER_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_own_loop(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = ("--model", str(tiny_model_dir), "--engine", "transformers")
    printed = run(tmp_path, str(EXAMPLES / "own_loop.py"), *model, "--steps", "2")
    assert "step 2: mean reward" in printed


def test_guess_number(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = ("--model", str(tiny_model_dir), "--engine", "transformers")
    printed = run(
        tmp_path,
        str(EXAMPLES / "guess_number.py"),
        *model,
        "--steps",
        "2",
        "--groups",
        "1",
        "--episodes",
        "4",
    )
    assert "of 4 episodes" in printed
    assert "user: I think of a number from 1 to 10." in printed
