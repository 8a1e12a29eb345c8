"""`sft()` on doubles over real gRPC: what is sent, recorded, refused, and how a run goes on after a stop."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import rows_of

import opentinker as ot
from opentinker import errors
from opentinker.loop.loggers import JsonlLogger
from opentinker.training.tuning import ServerOptions
from opentinkerapi.run.v1 import run_pb2
from opentinkerapi.runtime.tensors import unpack_floats, unpack_ids
from opentinkerapi.scheduler.v1 import job_pb2


def chats(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"{number} + 1?"},
                {"role": "assistant", "content": str(number + 1)},
            ]
        }
        for number in range(first, first + count)
    ]


def tune(doubles: World, tmp_path: Path, data: Any = None, **options: Any) -> ot.SftResult:
    defaults: dict[str, Any] = {"batch_size": 4, "steps": 3, "run_dir": tmp_path / "run", "seed": 5}
    return ot.sft(chats(10) if data is None else data, "tiny", **{**defaults, **options})


def calls(doubles: World, method: str) -> list[list[Any]]:
    return [messages for _, name, messages in doubles.trainer.ran if name == method]


def prompts(doubles: World) -> list[list[list[int]]]:
    """The rows of each step, as token ids."""
    return [
        [unpack_ids(row.chunks[0].tokens.token_ids) for row in rows_of(messages)]
        for messages in calls(doubles, "ForwardBackward")
    ]


def test_a_run_trains_measures_saves_and_publishes(doubles: World, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Watch(ot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            seen.append(("step", step))

        def on_evaluation(self, step: int, result: ot.HeldOut) -> None:
            seen.append(("evaluation", step))

        def on_checkpoint(self, step: int, checkpoint: Any) -> None:
            seen.append(("checkpoint", step))

        def on_end(self, result: ot.SftResult) -> None:
            seen.append(("end", result.steps))

    result = tune(
        doubles,
        tmp_path,
        steps=5,
        evaluation=chats(3, 100),
        evaluation_every=2,
        checkpoint_every=2,
        callbacks=[Watch()],
    )
    assert [method for _, method, _ in doubles.trainer.ran] == [
        "Forward",
        *("ForwardBackward", "OptimStep"),
        *("ForwardBackward", "OptimStep", "Forward", "SaveCheckpoint"),
        *("ForwardBackward", "OptimStep"),
        *("ForwardBackward", "OptimStep", "Forward", "SaveCheckpoint"),
        *("ForwardBackward", "OptimStep", "Forward", "SaveCheckpoint"),
        "PublishWeights",
    ]
    assert seen == [
        ("evaluation", 0),
        ("step", 1),
        *(("step", 2), ("checkpoint", 2), ("evaluation", 2), ("step", 3)),
        *(("step", 4), ("checkpoint", 4), ("evaluation", 4)),
        *(("step", 5), ("checkpoint", 5), ("evaluation", 5), ("end", 5)),
    ]
    assert (result.steps, result.version) == (5, 1)
    assert [step for step, _ in result.evaluations] == [0, 2, 4, 5]
    # The double says -0.5 at every loss token.
    assert result.held_out is not None
    assert result.held_out.loss == pytest.approx(0.5)
    assert result.held_out.perplexity == pytest.approx(1.6487213)
    assert result.held_out.tokens == 3 * len("102\n")
    run = doubles.scheduler.runs[result.run]
    assert run.state == run_pb2.RUN_STATE_SUCCEEDED
    config = json.loads(run.config_json)
    assert (config["kind"], config["rows"], config["tuning"]["rank"]) == ("sft", 10, 16)
    state = json.loads(doubles.scheduler.loop_states[-1].state)
    assert (state["next_ordinal"], state["step"]) == (20, 5)
    assert result.checkpoint is not None
    assert result.checkpoint.step == 5


def test_the_job_has_a_trainer_slot_only_until_the_policy_is_sampled(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path)
    (job,) = doubles.scheduler.jobs.values()
    assert job.kind == job_pb2.JOB_KIND_SFT
    assert [slot.role for slot in job.slots] == [job_pb2.SLOT_ROLE_TRAINER]
    assert doubles.inference.requests == []
    assert result.policy.chat("2 + 2?").result()
    serving = list(doubles.scheduler.jobs.values())[1]
    assert serving.kind == job_pb2.JOB_KIND_INFERENCE
    assert doubles.inference.requests[0].model.policy_version.version == 1
    # One is enough, however often and for whatever it is used.
    result.policy.load().result()
    result.policy.score([[1, 2]]).result()
    assert len(doubles.scheduler.jobs) == 2


def test_a_whole_model_is_served_merged_by_a_server_of_its_own(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path, tuning=ot.Full())
    result.policy.load().result()
    training, serving = doubles.scheduler.jobs.values()
    assert training.slots[0].tuning == job_pb2.TUNING_KIND_FULL
    (slot,) = serving.slots
    assert (slot.options.serving_mode, slot.options.exclusive) == ("merged", True)


def test_serve_holds_an_inference_slot_and_loads_the_result(doubles: World, tmp_path: Path) -> None:
    tune(doubles, tmp_path, serve=True, inference=ServerOptions(engine="transformers"))
    (job,) = doubles.scheduler.jobs.values()
    assert [slot.options.engine for slot in job.slots] == ["", "transformers"]
    assert doubles.inference.loaded == [1]


def test_the_denominator_is_the_loss_tokens_of_the_whole_batch(doubles: World, tmp_path: Path) -> None:
    rows = chats(8)
    rows[3]["weight"] = -2.5
    result = tune(doubles, tmp_path, rows, batch_size=8, steps=1, learning_rate=lambda step: 0.5 / step)
    ((start, *chunks),) = calls(doubles, "ForwardBackward")
    samples = [sample for chunk in chunks for sample in chunk.samples]
    tokens = sum(sample.loss_mask.count(1) for sample in samples)
    assert start.losses[0].denominator == tokens == 8 * 2
    assert start.losses[0].WhichOneof("loss") == "cross_entropy"
    weights = [set(unpack_floats(sample.weights).tolist()) for sample in samples if sample.weights]
    assert weights == [{0.0, -2.5}]
    # The double's loss sum is -1.
    assert result.losses == [-1.0 / tokens]
    ((step,),) = calls(doubles, "OptimStep")
    assert step.adamw.learning_rate == 0.5
    assert step.clip_norm == 1.0


def test_epochs_use_every_row_once_and_end_with_a_smaller_step(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path, steps=None, epochs=2, batch_size=8)
    sent = prompts(doubles)
    assert [len(rows) for rows in sent] == [8, 8, 4]
    flat = [tuple(row) for rows in sent for row in rows]
    assert sorted(flat[:10]) == sorted(flat[10:])
    assert len(set(flat)) == 10
    assert flat[:10] != flat[10:]
    assert [row["training/epoch"] for row in result.metrics] == [0.8, 1.6, 2.0]


def test_batches_by_tokens(doubles: World, tmp_path: Path) -> None:
    tune(doubles, tmp_path, batch_size=None, batch_tokens=100)
    sizes = [[len(row) for row in rows] for rows in prompts(doubles)]
    assert all(sum(lengths) <= 100 for lengths in sizes)
    assert all(sum(lengths) + max(lengths) > 100 for lengths in sizes)


def test_the_learning_rate_follows_warmup_and_decay(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path, steps=4, learning_rate=1e-3, warmup=2, decay="linear")
    assert [row["actor/lr"] for row in result.metrics] == pytest.approx([5e-4, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])


def test_b99_ten_steps_are_five_and_a_resumed_five(doubles: World, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 3, "checkpoint_every": 5, "evaluation": chats(2, 50)}
    straight = tune(doubles, tmp_path, steps=10, **settings)
    wanted = prompts(doubles)
    doubles.trainer.ran.clear()
    doubles.scheduler.loop_states.clear()
    first = tune(doubles, tmp_path, steps=5, **{**settings, "run_dir": tmp_path / "again"})
    again = tune(doubles, tmp_path, steps=10, resume=first.run, **{**settings, "run_dir": tmp_path / "again"})
    assert prompts(doubles) == wanted
    assert again.run == first.run != straight.run
    created = doubles.trainer.requests[-1]
    assert created.from_checkpoint == first.checkpoint.name  # type: ignore[union-attr]
    assert [row["training/global_step"] for row in again.metrics] == [6, 7, 8, 9, 10]
    lines = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
    assert doubles.scheduler.runs[first.run].state == run_pb2.RUN_STATE_SUCCEEDED


def test_a_run_starts_from_the_weights_of_a_checkpoint(doubles: World, tmp_path: Path) -> None:
    first = tune(doubles, tmp_path, checkpoint_every=10)
    assert first.checkpoint is not None
    for start in (first.checkpoint, first.checkpoint.name):
        doubles.trainer.ran.clear()
        tune(doubles, tmp_path, from_checkpoint=start)
        _, method, (request,) = doubles.trainer.ran[0]
        assert (method, request.checkpoint, request.weights_only) == (
            "RestoreCheckpoint",
            first.checkpoint.name,
            True,
        )
    with pytest.raises(errors.InvalidArgument, match="starts from its own checkpoint"):
        tune(doubles, tmp_path, from_checkpoint=first.checkpoint, resume=first.run)


def test_a_run_is_resumed_with_the_same_data_and_settings_only(doubles: World, tmp_path: Path) -> None:
    first = tune(doubles, tmp_path, checkpoint_every=3)
    for change, named in (
        ({"data": chats(9)}, "another data"),
        ({"seed": 6}, "another seed"),
        ({"batch_size": 5}, "another batch"),
        ({"tuning": ot.LoRA(rank=2)}, "another tuning"),
    ):
        with pytest.raises(errors.InvalidArgument, match=named):
            tune(doubles, tmp_path, resume=first.run, **{"steps": 6, **change})
    with pytest.raises(errors.InvalidArgument, match="3 steps of 3 already"):
        tune(doubles, tmp_path, resume=first.run)
    doubles.scheduler.loop_states.clear()
    with pytest.raises(errors.NotFound):
        tune(doubles, tmp_path, resume=first.run, steps=6)
    with pytest.raises(errors.InvalidArgument, match="must be the name of a run"):
        tune(doubles, tmp_path, resume="latest")


def test_what_is_left_out_is_counted_and_told(doubles: World, tmp_path: Path) -> None:
    long = {"prompt": "x" * 600, "completion": "y"}
    with pytest.raises(errors.InvalidArgument, match=r"data\[10\]: has \d+ tokens and max_tokens is 512"):
        tune(doubles, tmp_path, [*chats(10), long])
    result = tune(doubles, tmp_path, [*chats(10), long], too_long="drop")
    assert result.data["data/dropped_too_long"] == 1.0
    assert result.metrics[0]["data/dropped_too_long"] == 1.0
    with pytest.raises(errors.InvalidArgument, match="over the 512 that the trainer takes"):
        tune(doubles, tmp_path, max_tokens=1000)


def test_gradients_that_are_not_finite_end_the_run(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.skips = 2
    result = tune(doubles, tmp_path, steps=4, stop_after_skipped=3)
    assert [row["training/nonfinite_skips"] for row in result.metrics] == [1, 2, 0, 0]
    doubles.trainer.skips = 10
    with pytest.raises(errors.TrainingStopped, match="not finite for 3 steps in a row"):
        tune(doubles, tmp_path, steps=8, stop_after_skipped=3)
    assert doubles.scheduler.runs["runs/r1"].state == run_pb2.RUN_STATE_FAILED


def test_the_record_keeps_a_step_and_its_evaluation(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path, evaluation=chats(2, 50))
    doubles.portal.run(doubles.cluster.leave(failed=False))
    rows = doubles.scheduler.metrics[result.run]
    assert {"train/loss", "val/loss"} <= set(rows[3])
    assert "val/loss" in rows[0]
    assert "val/loss" not in rows[2]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"packing": True}, errors.UnsupportedOption, "packing: the trainer lays rows end to end"),
        ({"num_epochs": 3}, errors.UnsupportedOption, "it is called epochs"),
        ({"flash": True}, errors.InvalidArgument, "sft() has no option 'flash'"),
        ({"epochs": 1}, errors.InvalidArgument, "give epochs or steps"),
        ({"batch_tokens": 100}, errors.InvalidArgument, "one of the two"),
        ({"steps": 0}, errors.InvalidArgument, "steps: must be at least 1"),
        ({"evaluation_every": 1}, errors.InvalidArgument, "there is no evaluation data"),
        ({"decay": "exponential"}, errors.InvalidArgument, "decay: must be"),
        ({"learning_rate": float("nan")}, errors.InvalidArgument, "learning_rate: must be"),
        ({"learning_rate": abs, "warmup": 3}, errors.InvalidArgument, "a function says it all"),
        ({"too_long": "cut"}, errors.InvalidArgument, "too_long: must be one of"),
        ({"tuning": "lora"}, errors.InvalidArgument, "tuning"),
        ({"loggers": ["nowhere"]}, errors.InvalidArgument, "unknown logger"),
        ({"data": [{"messages": []}]}, errors.InvalidArgument, "data[0].messages: is empty"),
        ({"evaluation": [{"text": "x"}]}, errors.InvalidArgument, "evaluation[0]: unknown columns"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    doubles: World, tmp_path: Path, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind) as refused:
        tune(doubles, tmp_path, **options)
    assert says in str(refused.value)
    assert doubles.scheduler.runs == doubles.scheduler.jobs == {}


async def test_from_a_loop_of_ones_own(doubles: World, tmp_path: Path) -> None:
    result = await ot.sft_async(chats(4), "tiny", epochs=1, batch_size=2, run_dir=tmp_path / "run")
    assert result.steps == 2
    assert await asyncio.wait_for(result.policy.chat("1 + 1?"), 10)


def test_every_metric_is_in_the_table(doubles: World, tmp_path: Path) -> None:
    of_the_trainer = ("actor/entropy", "actor/skipped_steps", "loss/supervised", "rows/skipped")
    doubles.trainer.metrics = dict.fromkeys(of_the_trainer, (1.0, 2.0))
    result = tune(doubles, tmp_path, evaluation=chats(2, 50))
    section = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text().split("\n## ")[1]
    documented = set(re.findall(r"`([^`]+/[^`]+)`", section))
    rows = [*result.metrics, *(found.metrics() for _, found in result.evaluations)]
    assert {name for row in rows for name in row} == documented


def test_a_file_of_metrics_is_gone_on_with_behind_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "a"')
    logger = JsonlLogger(path, keep_steps=2)
    logger.log(3, {"a": 30.0})
    logger.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2},
        {"step": 3, "a": 30.0},
    ]


def test_the_curve(doubles: World, tmp_path: Path) -> None:
    result = tune(doubles, tmp_path, evaluation=chats(2, 50))
    assert result.plot(tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
