"""`opentinker sft`."""

import json
from pathlib import Path

import pytest
from client.tests.doubles.cluster import World
from typer.testing import CliRunner

from opentinker.cli.app import app
from opentinker.errors import InvalidArgument

RUNNER = CliRunner()


def test_a_file_is_tuned_on(doubles: World, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}", "note": "x"} for i in range(6)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    command = ["sft", str(data), "--model", "tiny", "--address", doubles.scheduler.address, "--key", "k"]
    options = [
        "--evaluation",
        str(data),
        "--batch-size",
        "2",
        "--ignore",
        "note",
        "--out",
        str(out),
        "--plot",
    ]
    done = RUNNER.invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    assert "runs/r0: 3 steps, loss" in done.output
    assert "step 0: held-out loss 0.5000" in done.output
    assert "published policies/p0 version 1" in done.output
    assert (out / "metrics.jsonl").exists()
    assert (out / "loss.png").exists()
    refused = RUNNER.invoke(app, [*command, "--decay", "slow"])
    assert isinstance(refused.exception, InvalidArgument)
    assert "'none', 'linear' or 'cosine'" in str(refused.exception)
    with pytest.raises(InvalidArgument, match="unknown columns"):
        RUNNER.invoke(app, command, catch_exceptions=False)
