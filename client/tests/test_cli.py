"""The command line: help, errors as sentences, a stack that is not there."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from client.tests.doubles.cluster import World
from typer.testing import CliRunner

import opentinker as ot
from opentinker.cli.app import app
from opentinker.cli.jobs import takes
from opentinker.cli.logs import in_words
from opentinker.connection import stack
from opentinker.demo import Clock, plot_rewards, summarize
from opentinkerapi.scheduler.v1 import job_pb2, log_pb2

RUNNER = CliRunner()


def test_help_names_every_command() -> None:
    text = RUNNER.invoke(app, ["--help"]).output
    assert all(
        command in text
        for command in (
            "up",
            "down",
            "status",
            "export",
            "sft",
            "users",
            "keys",
            "jobs",
            "queue",
            "attach",
            "logs",
            "usage",
        )
    )


def test_nothing_runs(tmp_path: Path) -> None:
    done = RUNNER.invoke(app, ["status", "--state-dir", str(tmp_path)])
    assert (done.exit_code, "opentinker up" in done.output) == (3, True)
    done = RUNNER.invoke(app, ["down", "--state-dir", str(tmp_path)])
    assert (done.exit_code, "no stack runs" in done.output) == (0, True)


def test_status_shows_a_cluster(doubles: World) -> None:
    doubles.cluster.create_policy("tiny", name="mine").result()
    done = RUNNER.invoke(app, ["status", "--address", doubles.scheduler.address, "--key", "k"])
    assert done.exit_code == 0, done.output
    assert "cluster double" in done.output
    assert "mine" in done.output
    assert "lora_rl" in done.output


def test_an_error_is_a_sentence_not_a_traceback(tmp_path: Path) -> None:
    code = (
        "import sys; from opentinker.connection import stack; stack.MODULE = 'opentinker_nowhere'; "
        f"sys.argv = ['opentinker', 'up', '--state-dir', {str(tmp_path)!r}]; "
        "from opentinker.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the embedded stack is not installed")
    assert "Traceback" not in done.stderr
    assert stack.MODULE == "opentinker_local"


def test_what_the_demo_sums_up(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.metrics = {"rollout_corr/logprob_abs_diff": (0.3, 10.0)}
    clock = Clock()
    result = ot.fit(
        ot.single_turn([{"prompt": "Even?"}], reward=lambda answer, task: float(int(answer) % 2)),
        "tiny",
        steps=7,
        groups_per_step=2,
        evaluation=ot.Evaluation(tasks=2, split="train"),
        run_dir=tmp_path,
        callbacks=[clock],
    )
    summary = summarize(result, clock)
    assert set(summary) == {
        "reward_first",
        "reward_last",
        "eval_before",
        "eval_after",
        "steps",
        "seconds",
        "trainer_sampler_logprob_gap",
    }
    assert summary["trainer_sampler_logprob_gap"] == pytest.approx(0.03)
    assert summary["seconds"] > 0
    plot_rewards(result.rewards, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"slots": 1}, "1 slot"),
        (
            {"slots": 2, "gpus": 0.5, "max_slot_hours": 4, "max_gpu_hours": 1},
            "2 slots, 0.5 GPUs, at most 1.00 GPU hours",
        ),
        (
            {"slots": 2, "max_slot_hours": 3, "hourly_price": 4, "max_price": 1234.5},
            "2 slots, at most 3.00 slot hours, price 4.00 an hour, at most 1,234.50",
        ),
        ({"slots": 2, "hourly_price": 0.125}, "2 slots, price 0.12 an hour"),
    ],
)
def test_what_a_job_takes_in_words(cost: dict[str, float], words: str) -> None:
    assert takes(job_pb2.JobCost(**cost)) == words


def test_lines_of_a_log_in_words() -> None:
    line = log_pb2.LogLine(server="servers/0123456789", role=job_pb2.SLOT_ROLE_INFERENCE)
    assert in_words(line).split() == ["inference", "01234567"]
    line.text = '{"event": "it broke", "level": "error", "exception": "Trace\\n  at"}'
    line.time.FromDatetime(datetime(2026, 1, 31, 12, 0, 1, tzinfo=UTC))
    expected = ["2026-01-31 12:00:01 inference 01234567 error   it broke", "    Trace", "      at"]
    assert in_words(line).splitlines() == expected
    for text in ("Traceback:", "[1, 2]", "{no object", '{"a": ' * 100_000):
        assert in_words(log_pb2.LogLine(server="servers/x", text=text)).endswith(text)
