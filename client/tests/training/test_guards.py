"""What keeps a run from training on nonsense: the self-check before the first update, skipped steps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.tests.doubles import runs
from client.tests.doubles.cluster import World
from client.tests.doubles.runs import methods
from client.tests.doubles.trainer import rows_of, sampled

import opentinker as ot
from opentinker import errors
from opentinker.loop import self_check
from opentinker.loop.result import FitResult
from opentinker.training.samples import TrainSample
from opentinkerapi.run.v1 import run_pb2


def train(doubles: World, tmp_path: Path, **options: Any) -> FitResult:
    algorithm = options.pop("algorithm", ot.GRPO(group_size=4))
    return runs.train(doubles, tmp_path, algorithm, **{"steps": 2, "groups_per_step": 8, **options})


def apart(gap: float) -> Any:
    """A trainer whose logprobs are that far from the sampler's."""

    def score(policy: str, start: Any, sample: Any) -> Any:
        return sampled(policy, start, sample) * (1 + 2 * gap)

    return score


@pytest.mark.parametrize(
    ("dtype", "gap", "refused"),
    [
        ("float32", 9e-4, False),
        ("float32", 1.2e-3, True),
        ("bfloat16", 0.07, False),
        ("bfloat16", 0.09, True),
    ],
)
def test_the_bound_is_what_rounding_explains(
    doubles: World, tmp_path: Path, dtype: str, gap: float, refused: bool
) -> None:
    doubles.trainer.dtype, doubles.trainer.score = dtype, apart(gap)
    if refused:
        with pytest.raises(errors.LogprobMismatch) as caught:
            train(doubles, tmp_path)
        assert methods(doubles) == ["Forward"]
        for cause in ("temperature (1)", "top_p", f"trainer {dtype}", "adapter (version 0)", "template"):
            assert cause in str(caught.value)
        assert [run.state for run in doubles.scheduler.runs.values()] == [run_pb2.RUN_STATE_FAILED]
        return
    result = train(doubles, tmp_path)
    row = result.metrics[0]
    assert row["rollout_corr/check_abs_diff"] == pytest.approx(gap, rel=1e-3)
    assert row["rollout_corr/check_bound"] == (1e-3 if dtype == "float32" else 0.08)
    assert row["rollout_corr/check_tokens"] > 0
    # Once, on some rows of the first batch; recorded where all metrics are.
    assert methods(doubles).count("Forward") == 1
    (forward,) = [messages for _, method, messages in doubles.trainer.ran if method == "Forward"]
    assert len(rows_of(forward)) == self_check.ROWS
    assert "rollout_corr/check_abs_diff" not in result.metrics[1]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert recorded[0]["rollout_corr/check_abs_diff"] == row["rollout_corr/check_abs_diff"]


def test_the_bound_can_be_set_and_the_check_left_out(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = apart(0.3)
    result = train(doubles, tmp_path, logprob_check=0.5)
    assert result.metrics[0]["rollout_corr/check_bound"] == 0.5
    assert json.loads(doubles.scheduler.runs[result.run].config_json)["logprob_check"] == 0.5
    doubles.trainer.ran.clear()
    assert train(doubles, tmp_path, logprob_check=False).steps
    assert "Forward" not in methods(doubles)
    with pytest.raises(errors.LogprobMismatch, match=r"more than 0\.2;"):
        train(doubles, tmp_path, logprob_check=0.2)


def test_logprobs_that_are_no_numbers_are_a_mismatch(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = apart(float("nan"))
    with pytest.raises(errors.LogprobMismatch, match="differ by nan"):
        train(doubles, tmp_path)


def test_a_batch_that_is_scored_anyway_is_compared_whole(doubles: World, tmp_path: Path) -> None:
    algorithm = ot.GRPO(group_size=4, epochs=2)
    result = train(doubles, tmp_path, algorithm=algorithm, steps=1)
    assert methods(doubles).count("Forward") == 1
    assert result.metrics[0]["rollout_corr/check_tokens"] == result.metrics[0]["tokens/loss"]
    doubles.trainer.score = apart(0.01)
    with pytest.raises(errors.LogprobMismatch):
        train(doubles, tmp_path, algorithm=algorithm, steps=1)


def test_rows_are_taken_from_all_over_the_batch() -> None:
    rows = [TrainSample([1, 2], [0, 1], logprobs=[0, -1])] * 100
    picked = self_check.chosen(rows)
    assert (len(picked), picked[0], picked[-1]) == (16, 0, 99)
    assert self_check.chosen(rows[:3]) == [0, 1, 2]


def test_masked_tokens_are_not_compared(doubles: World) -> None:
    policy = doubles.cluster.create_policy("tiny").result()
    row = TrainSample([1, 2, 3], [0, 1, 0], logprobs=np.array([0, -0.5, 77], dtype=np.float32))
    found = doubles.cluster.wait(self_check.check(policy, [row], bound=None))
    assert (found.difference, found.tokens) == (0.0, 1)


def test_skipped_steps_stop_at_the_last_good_checkpoint(doubles: World, tmp_path: Path) -> None:
    """B117: what is saved while gradients are not finite would not be the last good state."""

    class Breaks(ot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            if step == 3:
                doubles.trainer.skips = 100

    with pytest.raises(errors.TrainingStopped, match=r"4 steps in a row.*optimizer step 2") as caught:
        train(
            doubles,
            tmp_path,
            steps=50,
            checkpoint_every=2,
            stop_after_skipped=4,
            callbacks=[Breaks()],
        )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["training/nonfinite_skips"] for row in rows] == [0, 0, 0, 1, 2, 3, 4]
    assert [row["training/optimizer_step"] for row in rows] == [1, 2, 3, 3, 3, 3, 3]
    saved = [name for name in methods(doubles) if name == "SaveCheckpoint"]
    assert len(saved) == 1
    assert caught.value.metadata["checkpoint"].endswith("c2")
    assert [state.step for state in doubles.scheduler.loop_states] == [2]


def test_without_a_checkpoint_the_unchanged_weights_are_saved(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.skips = 100
    with pytest.raises(errors.TrainingStopped, match="optimizer step 0") as caught:
        train(doubles, tmp_path, steps=50, stop_after_skipped=3)
    assert methods(doubles).count("SaveCheckpoint") == 1
    assert caught.value.metadata["checkpoint"].endswith("c0")


def test_a_skip_now_and_then_stops_nothing(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.skips = 2
    result = train(doubles, tmp_path, steps=6, stop_after_skipped=3)
    assert (result.steps, result.stopped) == (4, "")


def test_a_critic_without_a_gradient_stops_the_run_too(doubles: World, tmp_path: Path) -> None:
    """While it warms up nothing else learns."""
    doubles.trainer.skips = 100
    algorithm = ot.ActorCritic(critic=ot.Critic(warmup=10))
    with pytest.raises(errors.TrainingStopped, match="3 steps in a row"):
        train(doubles, tmp_path, algorithm=algorithm, steps=50, stop_after_skipped=3)
    assert methods(doubles).count("PublishWeights") == 0
