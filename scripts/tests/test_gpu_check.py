"""The GPU check, run without one: every part on a CPU, and what is told when a part does not come back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from scripts.gpu_checks import Setup, matrix_weights, peak_tflops


@pytest.fixture
def setup(tmp_path: Path, tiny_model_dir: Path) -> Setup:
    return Setup(
        model=str(tiny_model_dir),
        device="cpu",
        engine="transformers",
        scratch=str(tmp_path),
        requests=2,
        new_tokens=4,
        rows=2,
        row_tokens=16,
        steps=1,
        peak_tflops=None,
    )


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpu", lambda: None)
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no GPU" in err


def test_the_peak_of_a_device_is_by_its_name() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert peak_tflops("NVIDIA L40S") == 362.0
    assert peak_tflops("NVIDIA L4") == 121.0
    assert peak_tflops("something else") is None


def test_weights_that_a_token_meets_are_the_matrices(tiny_model_dir: Path) -> None:
    attention = 64 * (4 * 32) * 2 + 64 * (2 * 32) * 2
    mlp = 3 * 64 * 128
    # The output layer is the embedding: it is multiplied once, looked up once.
    output = 320 * 64
    assert matrix_weights(tiny_model_dir) == 2 * (attention + mlp) + output


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('nothing of use')", "printed nothing"),
        ("import time; time.sleep(600)", "took more than 1 s"),
    ],
    ids=["fails", "silent", "hangs"],
)
def test_a_part_that_does_not_come_back_is_reported(
    code: str, error: str, setup: Setup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "part.py"
    program.write_text(f"import sys\nprint('why', file=sys.stderr, flush=True)\n{code}\n")
    monkeypatch.setattr(gpu_check, "command", lambda name, setup: [sys.executable, str(program)])
    found = gpu_check.run_part("nccl", setup, 1.0 if "sleep" in code else 60.0)
    assert found["ok"] is False
    assert found["error"] == error
    assert "why" in str(found["log"])


def test_parts_that_no_time_is_left_for_are_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "BUDGET_S", 0.0)
    found: Any = gpu_check.check(setup, ("nccl", "training"), None)
    assert found["ok"] is False
    assert {part["error"] for part in found["parts"].values()} == {"no time was left"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_part_runs_on_a_cpu(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--engine", "transformers", "--model", str(tiny_model_dir)]
    arguments += ["--requests", "4", "--new-tokens", "8", "--rows", "4", "--row-tokens", "32", "--steps", "2"]
    assert gpu_check.main([*arguments, "--peak-tflops", "0.1", "--out", str(out)]) == 0, out.read_text()
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found == json.loads(out.read_text())
    assert set(found["parts"]) == {"nccl", "training", "adapter", "merged"}
    for name in ("adapter", "merged"):
        part = found["parts"][name]
        assert part["logprob_gap"]["same_precision"] < 1e-4 < part["logprob_gap"]["of_the_base"]
        assert part["tokens_per_s"] > 0
    assert found["parts"]["training"]["mfu"] > 0
