"""Policies of all weights: exact gradients, isolation, files that others load, resume to the bit."""

import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch, sample
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec
from opentinker_trainer.engine.core import TorchEngine
from opentinker_trainer.engine.tensor_files import Writer
from opentinkerapi.runtime.reasons import Reason

CE = Component("main", CrossEntropy(), denominator=10.0)
STEP = AdamWStep(learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0)
NAME = "policies/full"


def snapshot(engine: TorchEngine, name: str = NAME) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in engine._policies[name].parameters.items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def train(engine: TorchEngine, name: str = NAME, steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward(name, ragged_batch(), [CE])
        engine.optim_step(name, STEP)


def plain_model(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def logprobs_of(model: torch.nn.Module, row: Sample) -> torch.Tensor:
    """[L - 1], differentiable: of each token after the first."""
    ids = torch.tensor(row.token_ids[None].astype(np.int64))
    logits = model(ids).logits[0].float() / row.temperature
    return torch.log_softmax(logits, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_the_gradient_is_that_of_the_whole_model(make_engine: MakeEngine, tiny_model_dir: Path) -> None:
    """Tied embeddings included: once as weight, with what both of their uses add."""
    engine = make_engine()
    engine.create_policy(NAME, FullSpec(), seed=0)
    engine.forward_backward(NAME, ragged_batch(), [CE])
    model = plain_model(tiny_model_dir)
    total = sum(-logprobs_of(model, row)[torch.tensor(row.loss_mask[1:])].sum() for row in ragged_batch())
    (total / 10.0).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert "lm_head.weight" not in expected
    gradient = gradient_of(engine, NAME)
    assert largest_difference(gradient, expected) < 2e-6 * max(1.0, largest(expected))


def test_policies_of_both_kinds_leave_base_and_each_other_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = engine.base_digest()
    engine.create_policy(NAME, FullSpec(), seed=0)
    bare = engine.forward(NAME, ragged_batch(), use_base_model=True)
    fresh = engine.forward(NAME, ragged_batch())
    train(engine)
    alone = snapshot(engine)
    # The same again, between the steps of an adapter and of another copy.
    engine.create_policy(NAME, FullSpec(), seed=5)
    engine.create_policy("policies/lora", SPEC, seed=1)
    engine.create_policy("policies/other", FullSpec(), seed=0)
    for _ in range(2):
        for name in (NAME, "policies/lora", "policies/other"):
            engine.forward_backward(name, ragged_batch() if name == NAME else ragged_batch()[:3], [CE])
        for name in ("policies/other", "policies/lora", NAME):
            engine.optim_step(name, STEP)
    assert same(snapshot(engine), alone)
    assert not same(snapshot(engine, "policies/other"), alone)
    assert engine.base_digest() == before
    again = engine.forward(NAME, ragged_batch(), use_base_model=True)
    moved = engine.forward(NAME, ragged_batch())
    for one, two, three, four in zip(bare.scores, fresh.scores, again.scores, moved.scores, strict=True):
        np.testing.assert_array_equal(one.logprobs, two.logprobs)
        np.testing.assert_array_equal(one.logprobs, three.logprobs)
        assert np.abs(four.logprobs - one.logprobs).max() > 1e-2
    engine.drop_policy(NAME)
    engine.create_policy(NAME, FullSpec(), seed=0)
    assert (
        engine.forward(NAME, ragged_batch()).scores[0].logprobs.tolist() == bare.scores[0].logprobs.tolist()
    )


@pytest.mark.parametrize("shard_bytes", [2**30, 60_000])
def test_transformers_loads_what_is_exported(
    make_engine: MakeEngine, tmp_path: Path, shard_bytes: int
) -> None:
    engine = make_engine(shard_bytes=shard_bytes)
    engine.create_policy(NAME, FullSpec(value_head=True), seed=0)
    train(engine)
    files = engine.export(NAME, tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(files)
    assert engine.export(NAME, tmp_path / "two") == files
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert {"config.json", "generation_config.json", "tokenizer.json"} & set(files) >= {"config.json"}
    weights = [name for name in files if name.endswith(".safetensors")]
    if shard_bytes == 2**30:
        assert weights == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(weights)
        assert len(weights) > 3
        assert weights[0] == f"model-00001-of-{len(weights):05d}.safetensors"
        sizes = [(tmp_path / "one" / name).stat().st_size for name in weights]
        assert sum(size > shard_bytes + 2000 for size in sizes) <= 1  # the embedding alone is larger
    # An exported model has neither the value head nor tied weights twice, and says how wide it is.
    names = set().union(*(load_file(tmp_path / "one" / name) for name in weights))
    assert not [name for name in names if "value_head" in name or "lm_head" in name]
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert "float32" in (config.get("dtype"), config.get("torch_dtype"))
    model = plain_model(tmp_path / "one")
    row = sample(4, 6, 9)
    mine = engine.forward(NAME, [row]).scores[0].logprobs
    theirs = logprobs_of(model, row).detach().numpy()
    np.testing.assert_allclose(mine[4:], theirs[3:], atol=1e-5)


def test_in_bfloat16_steps_too_small_for_it_add_up(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Weights and moments are float32 whatever the forward pass is in; what is published is what it used."""
    engine = make_engine(dtype="bfloat16")
    policy = engine.create_policy(NAME, FullSpec(), seed=0)
    assert {weight.dtype for weight in policy.parameters.values()} == {torch.float32}
    before = snapshot(engine)
    engine.export(NAME, tmp_path / "v0")
    tiny = AdamWStep(learning_rate=1e-6)
    engine.forward_backward(NAME, ragged_batch(), [CE])
    engine.optim_step(NAME, tiny)
    moved = snapshot(engine)
    changed = sum(int((moved[name] != before[name]).sum()) for name in moved)
    narrow = sum(int((moved[name].bfloat16() != before[name].bfloat16()).sum()) for name in moved)
    assert changed > 50 * narrow
    for _ in range(30):
        engine.forward_backward(NAME, ragged_batch()[:1], [CE])
        engine.optim_step(NAME, AdamWStep(learning_rate=5e-6))
    engine.export(NAME, tmp_path / "v1")
    first, last = (load_file(tmp_path / v / "model.safetensors") for v in ("v0", "v1"))
    assert {weight.dtype for weight in last.values()} == {torch.bfloat16}
    assert not same(first, last)
    assert {weight.dtype for weight in policy.optimizer.second.values()} == {torch.float32}
    # The state keeps what the export rounds away.
    engine.save_state(NAME, tmp_path / "state")
    assert same(load_file(tmp_path / "state" / "model.safetensors"), snapshot(engine))
    logprobs = engine.forward(NAME, ragged_batch()).scores[2].logprobs
    other = make_engine(dtype="bfloat16")
    other.create_policy(NAME, FullSpec(), seed=0)
    other.load_state(NAME, tmp_path / "state")
    np.testing.assert_array_equal(other.forward(NAME, ragged_batch()).scores[2].logprobs, logprobs)


@pytest.mark.parametrize("shard_bytes", [2**30, 60_000])
def test_state_files_restore_every_bit(make_engine: MakeEngine, tmp_path: Path, shard_bytes: int) -> None:
    """B100: weights, moments, steps, accumulated gradient and randomness; sharded or not."""
    spec = FullSpec(value_head=True)
    engine = make_engine(shard_bytes=shard_bytes)
    engine.create_policy(NAME, spec, seed=1)
    train(engine)
    late = replace(CE, name="late", denominator=None)
    engine.forward_backward(NAME, ragged_batch()[:4], [CE, late])
    files = engine.save_state(NAME, tmp_path / "state")
    assert "value_head.safetensors" in files
    assert any(name.startswith("gradient") for name in files)

    def finish(target: TorchEngine) -> dict[str, torch.Tensor]:
        target.forward_backward(NAME, ragged_batch()[4:], [CE])
        assert target.optim_step(NAME, STEP, {"late": 4.0}).step == 3
        return snapshot(target)

    expected = finish(engine)
    other = make_engine(shard_bytes=shard_bytes)
    policy = other.create_policy(NAME, spec, seed=99)
    assert other.load_state(NAME, tmp_path / "state") == 2
    assert same(finish(other), expected)
    kept = engine._policies[NAME]
    assert same(policy.optimizer.first, kept.optimizer.first)
    assert same(policy.optimizer.second, kept.optimizer.second)
    assert policy.optimizer.steps == kept.optimizer.steps == 3
    assert torch.equal(policy.generator.get_state(), kept.generator.get_state())


def test_a_gradient_that_is_not_finite_changes_nothing(make_engine: MakeEngine) -> None:
    """B117, where every weight is trained."""
    engine = make_engine()
    policy = engine.create_policy(NAME, FullSpec(), seed=0)
    train(engine)
    before, moments = snapshot(engine), {k: v.clone() for k, v in policy.optimizer.first.items()}
    logprobs = engine.forward(NAME, ragged_batch()).scores[1].logprobs
    engine.forward_backward(NAME, ragged_batch(), [CE])
    gradient_of(engine, NAME)["model.norm.weight"][3] = torch.inf
    report = engine.optim_step(NAME, STEP)
    assert (report.skipped, report.step, report.consecutive_skips) == (True, 2, 1)
    assert same(snapshot(engine), before)
    assert same(policy.optimizer.first, moments)
    np.testing.assert_array_equal(engine.forward(NAME, ragged_batch()).scores[1].logprobs, logprobs)


def test_weights_of_another_shape_are_refused_and_change_nothing(
    make_engine: MakeEngine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.create_policy(NAME, FullSpec(), seed=0)
    train(engine, steps=1)
    before = snapshot(engine)
    weights = load_file(tiny_model_dir / "model.safetensors")
    norm = weights["model.norm.weight"]
    cases: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "missing": ({k: v for k, v in weights.items() if k != "model.norm.weight"}, "model.norm.weight"),
        "extra": (weights | {"model.more": norm.clone()}, "model.more"),
        "shape": (weights | {"model.norm.weight": norm[:-1].clone()}, "model.norm.weight"),
        "untied": (weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, "lm_head.weight"),
    }
    for case, (tensors, name) in cases.items():
        (tmp_path / case).mkdir()
        save_file(tensors, tmp_path / case / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ServiceError, match=name) as caught:
            engine.load_state(NAME, tmp_path / case, weights_only=True)
        assert caught.value.reason is Reason.INVALID_WEIGHTS
    (tmp_path / "torn").mkdir()
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    (tmp_path / "torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ServiceError, match=r"model\.safetensors cannot be read"):
        engine.load_state(NAME, tmp_path / "torn", weights_only=True)
    with pytest.raises(ServiceError, match="weights only"):
        engine.load_state(NAME, tiny_model_dir)
    assert same(snapshot(engine), before)
    # The base's own folder is a set of weights like any other; tied ones may be there twice.
    double = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    (tmp_path / "double").mkdir()
    save_file(double, tmp_path / "double" / "model.safetensors", metadata={"format": "pt"})
    for path in (tiny_model_dir, tmp_path / "double"):
        assert engine.load_state(NAME, path, weights_only=True) == 0
        assert same(snapshot(engine), weights)


def test_what_cannot_be_written_is_told_after_all_was_gathered(tmp_path: Path) -> None:
    """Other ranks go on putting tensors together, so the rank that writes must, too."""
    asked: list[str] = []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(4)

    (tmp_path / "file").write_text("in the way")
    writer = Writer(tmp_path / "file" / "folder", 16, active=True)
    writer.write_tensors("model", {"a": (4,), "b": (4,)}, get, lambda _: torch.float32)
    writer.write_json("config.json", {})
    assert asked == ["a", "b"]
    with pytest.raises(OSError, match="Not a directory"):
        writer.finish()


def test_a_forward_pass_in_float32_publishes_float32(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What is sampled from is what the trainer computed with."""
    engine = make_engine(dtype="bfloat16", forward_dtype="float32")
    engine.create_policy(NAME, FullSpec(), seed=0)
    train(engine, steps=1)
    engine.export(NAME, tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), snapshot(engine))


def test_a_copy_that_is_dropped_is_freed(make_engine: MakeEngine) -> None:
    """At once, and with it optimizer state and gradient: the next policy needs the memory."""
    engine = make_engine()
    policy = engine.create_policy(NAME, FullSpec(), seed=0)
    train(engine, steps=1)
    engine.forward_backward(NAME, ragged_batch(), [CE])
    tensors = [
        *policy.parameters.values(),
        *policy.optimizer.first.values(),
        *gradient_of(engine, NAME).values(),
    ]
    watched = [weakref.ref(tensor) for tensor in tensors]
    model = weakref.ref(policy.weights._model)  # type: ignore[attr-defined]
    del policy, tensors
    engine.drop_policy(NAME)
    assert model() is None
    assert not [tensor for tensor in watched if tensor() is not None]


def test_a_device_that_is_not_there_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ServiceError, match="cuda:9 is not there") as caught:
        make_engine(device="cuda:9")
    assert caught.value.field == "device"
