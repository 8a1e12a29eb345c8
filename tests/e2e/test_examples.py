"""The examples run: on the embedded stack, with a tiny model that learns nothing in so few steps."""

import math
import os
import re
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


def test_sft_chats(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = ("--model", str(tiny_model_dir), "--engine", "transformers", "--out", str(tmp_path / "out"))
    small = ("--chats", "24", "--held-out", "4", "--epochs", "1", "--batch-size", "8")
    printed = run(tmp_path, str(EXAMPLES / "sft_chats.py"), *model, *small)
    before, after = map(float, re.findall(r"held-out loss ([0-9.]+) -> ([0-9.]+) in 3 steps", printed)[0])
    assert after < before
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_dpo(tmp_path: Path, tiny_model_dir: Path) -> None:
    small = ("--model", str(tiny_model_dir), "--pairs", "8", "--batch", "8", "--learning-rate", "3e-3")
    printed = run(tmp_path, str(EXAMPLES / "dpo.py"), *small, "--steps", "6")
    losses = [float(text) for text in re.findall(r"step \d+: loss ([0-9.]+)", printed)]
    # At first the policy is its reference: a margin of 0, and log 2.
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6
