"""Several ranks compute what one does: losses, gradients, metrics and per-token results of every loss."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from services.trainer.tests.engine import rank_cases
from torch import Tensor

from opentinker_trainer.engine.ranks import Ranks

BOUND = 1e-6
Results = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> Results:
    """Of one process."""
    numbers, tensors = rank_cases.compute(rank_cases.make_engine(tiny_model_dir, Ranks()))
    return json.loads(json.dumps(numbers)), tensors


def run(count: int, model: Path, folder: Path) -> Results:
    """Have `count` ranks compute the cases; what they say together."""
    command = [sys.executable, "-m", "services.trainer.tests.engine.rank_cases"]
    processes = [
        subprocess.Popen(
            [*command, str(model), str(folder / "store"), str(folder)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[4],
            start_new_session=True,
        )
        for rank in range(count)
    ]
    try:
        assert [process.wait(240) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    return rank_cases.read(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [2, 4])
def test_any_number_of_ranks_gives_the_same(
    count: int, expected: Results, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """B02, B14, B20, B113: sums and denominators are the request's, not a rank's, in losses and metrics;
    ranks without rows, without loss tokens or without a policy loss take part.
    """
    numbers, tensors = run(count, tiny_model_dir, tmp_path)
    assert numbers.keys() == expected[0].keys()
    for key, values in expected[0].items():
        for ours, theirs in zip(values, numbers[key], strict=True):
            if not isinstance(ours, dict):
                assert ours == theirs, key
                continue
            assert ours.keys() == theirs.keys(), key
            for name, (total, weight) in ours.items():
                assert weight == theirs[name][1], (key, name)
                assert total == pytest.approx(theirs[name][0], abs=BOUND * max(1.0, weight), rel=BOUND), (
                    key,
                    name,
                )
    assert tensors.keys() == expected[1].keys()
    for key, ours in expected[1].items():
        scale = max(1.0, float(ours.abs().max()))
        assert ours.shape == tensors[key].shape, key
        assert float((ours - tensors[key]).abs().max()) < BOUND * scale, key
    moved = [float(value.abs().max()) for key, value in tensors.items() if "/gradient/" in key]
    assert sum(largest > 1e-3 for largest in moved) > len(moved) // 2
    assert torch.equal(
        tensors["lora/nothing/logprobs/0"], torch.zeros_like(tensors["lora/nothing/logprobs/0"])
    )
