"""Several policies on one base: isolation, deterministic creation, slots, steps, files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from services.trainer.tests.builders import gradient_of, largest, ragged_batch, sample
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component, CrossEntropy, Ppo
from opentinker_trainer.domain.tuning import AdamWStep, LoraSpec
from opentinker_trainer.engine.core import TorchEngine
from opentinker_trainer.engine.optimizer import AdamWState, apply_step
from opentinkerapi.runtime.reasons import Reason

CE = Component("main", CrossEntropy(), denominator=10.0)
STEP = AdamWStep(learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0)
SMALL = LoraSpec(2, 4.0, ("q_proj", "v_proj"))


def snapshot(engine: TorchEngine, name: str) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in engine._policies[name].parameters.items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def train(engine: TorchEngine, name: str, steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward(name, ragged_batch(), [CE])
        engine.optim_step(name, STEP)


def test_policies_share_a_base_and_nothing_else(make_engine: MakeEngine) -> None:
    engine = make_engine()
    before = engine.base_digest()
    engine.create_policy("policies/a", SPEC, seed=1)
    train(engine, "policies/a")
    alone = snapshot(engine, "policies/a")

    # The same again, interleaved with another of another shape.
    engine.create_policy("policies/a", SPEC, seed=1)
    engine.create_policy("policies/b", SMALL, seed=2)
    for _ in range(2):
        engine.forward_backward("policies/a", ragged_batch(), [CE])
        engine.forward_backward("policies/b", ragged_batch()[:3], [CE])
        engine.optim_step("policies/b", STEP)
        engine.optim_step("policies/a", STEP)
    assert equal(snapshot(engine, "policies/a"), alone)
    assert engine.base_digest() == before
    assert largest(snapshot(engine, "policies/b")) > 0
    assert all(parameter.dtype == torch.float32 for parameter in alone.values())


def test_creation_is_a_function_of_the_seed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.create_policy("policies/a", SPEC, seed=2**63 + 5)
    torch.rand(3)
    engine.create_policy("policies/b", SPEC, seed=2**63 + 5)
    engine.create_policy("policies/c", SPEC, seed=6)
    assert equal(snapshot(engine, "policies/a"), snapshot(engine, "policies/b"))
    assert not equal(snapshot(engine, "policies/a"), snapshot(engine, "policies/c"))


def test_a_slot_used_again_can_be_trained(make_engine: MakeEngine) -> None:
    """B87: create, delete, create; with another policy around and as the last one."""
    engine = make_engine()
    for other in ("policies/other", None):
        if other:
            engine.create_policy(other, SMALL, seed=0)
        for _ in range(2):
            engine.create_policy("policies/a", SPEC, seed=4)
            engine.forward_backward("policies/a", ragged_batch(), [CE])
            gradient = gradient_of(engine, "policies/a")
            assert max(float(v.abs().max()) for k, v in gradient.items() if ".lora_B." in k) > 0
            engine.drop_policy("policies/a")
        if other:
            engine.drop_policy(other)
    assert engine.policies == ()


def test_with_the_adapter_off_the_base_answers(shared_engine: TorchEngine) -> None:
    """And a nonzero B changes what the policy says (B86)."""
    shared_engine.create_policy("policies/off", SPEC, seed=0)
    rows = ragged_batch()
    fresh = shared_engine.forward("policies/off", rows)
    train(shared_engine, "policies/off")
    trained = shared_engine.forward("policies/off", rows)
    base = shared_engine.forward("policies/off", rows, use_base_model=True)
    for before, after, bare in zip(fresh.scores, trained.scores, base.scores, strict=True):
        np.testing.assert_array_equal(before.logprobs, bare.logprobs)
        assert np.abs(after.logprobs - bare.logprobs).max() > 1e-2


def test_exported_adapter_means_the_same_to_peft(
    shared_engine: TorchEngine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """B86: what is published, loaded by PEFT on a fresh base, gives the trainer's logprobs."""
    shared_engine.create_policy("policies/export", SPEC, seed=0)
    train(shared_engine, "policies/export", steps=3)
    shared_engine.export("policies/export", tmp_path / "one")
    shared_engine.export("policies/export", tmp_path / "two")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    row = sample(4, 6, 9)
    mine = shared_engine.forward("policies/export", [row]).scores[0].logprobs
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "one")
    ids = torch.tensor(row.token_ids[None].astype(np.int64))
    theirs = torch.log_softmax(model(ids).logits[0].float(), -1)
    expected = theirs[:-1].gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(mine[4:], expected[3:], atol=1e-4)


def test_a_one_token_answer_has_its_own_loss(shared_engine: TorchEngine) -> None:
    """B30: the first answer token is trained on, at its own position."""
    shared_engine.create_policy("policies/one", SPEC, seed=0)
    row = sample(5, 1, 3)
    logprob = float(shared_engine.forward("policies/one", [row]).scores[0].logprobs[5])
    output = shared_engine.forward_backward("policies/one", [row], [CE])
    assert output.loss_sums["main"] == (pytest.approx(-logprob), 1.0)
    assert logprob != 0.0


def test_what_the_mask_hides_is_never_read(shared_engine: TorchEngine) -> None:
    """B16: -inf and NaN outside the mask leave loss and gradient finite."""
    shared_engine.create_policy("policies/mask", SPEC, seed=0)
    rows = ragged_batch()
    dirty = []
    for row in rows:
        assert row.behavior_logprobs is not None
        assert row.advantages is not None
        hidden = ~row.loss_mask
        dirty.append(
            replace(
                row,
                behavior_logprobs=np.where(hidden, -np.inf, row.behavior_logprobs).astype(np.float32),
                advantages=np.where(hidden, np.nan, row.advantages).astype(np.float32),
            )
        )
    ppo = Component("main", Ppo(), denominator=10.0)
    clean = shared_engine.forward_backward("policies/mask", rows, [ppo])
    expected = gradient_of(shared_engine, "policies/mask")
    shared_engine.create_policy("policies/mask", SPEC, seed=0)
    output = shared_engine.forward_backward("policies/mask", dirty, [ppo])
    assert output.loss_sums == clean.loss_sums
    assert equal(gradient_of(shared_engine, "policies/mask"), expected)


def test_first_minibatch_has_ratio_one(shared_engine: TorchEngine) -> None:
    """B56: old and new logprobs of the same weights agree though the batches are cut differently."""
    shared_engine.create_policy("policies/ratio", SPEC, seed=0)
    train(shared_engine, "policies/ratio", steps=1)
    rows = ragged_batch()
    scores = shared_engine.forward("policies/ratio", rows).scores
    rows = [replace(row, behavior_logprobs=score.logprobs) for row, score in zip(rows, scores, strict=True)]
    metrics = shared_engine.forward_backward(
        "policies/ratio", rows[::-1], [Component("main", Ppo(), 1.0)]
    ).metrics
    total, weight = metrics["rollout_corr/ratio"]
    assert total / weight == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ppo_kl"][0] / weight == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"][0] == 0.0


def test_a_gradient_that_is_not_finite_changes_nothing(shared_engine: TorchEngine) -> None:
    """B117: skipped, counted, and the policy goes on with the next good one."""
    policy = shared_engine.create_policy("policies/nan", SPEC, seed=0)
    train(shared_engine, "policies/nan", steps=1)
    before = snapshot(shared_engine, "policies/nan")
    moments = {k: v.clone() for k, v in policy.optimizer.first.items()}
    for round_ in (1, 2):
        shared_engine.forward_backward("policies/nan", ragged_batch(), [CE])
        next(iter(gradient_of(shared_engine, "policies/nan").values())).view(-1)[0] = torch.nan
        report = shared_engine.optim_step("policies/nan", STEP)
        assert (report.skipped, report.step, report.consecutive_skips) == (True, 1, round_)
    assert equal(snapshot(shared_engine, "policies/nan"), before)
    assert equal(policy.optimizer.first, moments)
    train(shared_engine, "policies/nan", steps=1)
    assert policy.consecutive_skips == 0
    assert not equal(snapshot(shared_engine, "policies/nan"), before)


def test_state_files_restore_every_bit(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    engine.create_policy("policies/a", SPEC, seed=1)
    train(engine, "policies/a")
    engine.forward_backward(
        "policies/a", ragged_batch()[:4], [CE, replace(CE, name="late", denominator=None)]
    )
    engine.save_state("policies/a", tmp_path / "state")

    def finish(target: TorchEngine) -> dict[str, torch.Tensor]:
        target.forward_backward("policies/a", ragged_batch()[4:], [CE])
        assert target.optim_step("policies/a", STEP, {"late": 4.0}).step == 3
        return snapshot(target, "policies/a")

    expected = finish(engine)
    other = make_engine()
    policy = other.create_policy("policies/a", SPEC, seed=99)
    assert other.load_state("policies/a", tmp_path / "state") == 2
    assert equal(finish(other), expected)
    assert equal(policy.optimizer.first, engine._policies["policies/a"].optimizer.first)
    assert torch.equal(policy.generator.get_state(), engine._policies["policies/a"].generator.get_state())


def test_weights_only_leaves_the_optimizer_new(shared_engine: TorchEngine, tmp_path: Path) -> None:
    shared_engine.create_policy("policies/w", SPEC, seed=1)
    train(shared_engine, "policies/w")
    weights = snapshot(shared_engine, "policies/w")
    shared_engine.save_state("policies/w", tmp_path)
    policy = shared_engine.create_policy("policies/w", SPEC, seed=2)
    assert shared_engine.load_state("policies/w", tmp_path, weights_only=True) == 0
    assert equal(snapshot(shared_engine, "policies/w"), weights)
    assert policy.optimizer.steps == 0
    assert policy.optimizer.first == {}


def test_weights_that_do_not_fit_are_refused_and_change_nothing(
    shared_engine: TorchEngine, tmp_path: Path
) -> None:
    shared_engine.create_policy("policies/fit", SMALL, seed=1)
    shared_engine.save_state("policies/fit", tmp_path)
    shared_engine.create_policy("policies/fit", LoraSpec(2, 4.0, ("o_proj",)), seed=1)
    before = snapshot(shared_engine, "policies/fit")
    with pytest.raises(ServiceError) as caught:
        shared_engine.load_state("policies/fit", tmp_path)
    assert caught.value.reason is Reason.INVALID_WEIGHTS
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    shared_engine.create_policy("policies/fit", SMALL, seed=1)
    with pytest.raises(ServiceError, match="alpha"):
        shared_engine.load_state("policies/fit", tmp_path)
    assert before.keys() != snapshot(shared_engine, "policies/fit").keys()


def test_unknown_targets_are_refused_by_name(shared_engine: TorchEngine) -> None:
    with pytest.raises(ServiceError, match="'w_proj' is no linear layer") as caught:
        shared_engine.create_policy("policies/no", LoraSpec(2, 4.0, ("q_proj", "w_proj")), seed=0)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert "policies/no" not in shared_engine.policies


def test_deferred_denominators_are_checked(shared_engine: TorchEngine) -> None:
    shared_engine.create_policy("policies/d", SPEC, seed=0)
    shared_engine.forward_backward("policies/d", ragged_batch(), [replace(CE, denominator=None)])
    for given in ({}, {"main": 1.0, "else": 1.0}):
        with pytest.raises(ServiceError, match=r"'main'|'else'"):
            shared_engine.optim_step("policies/d", STEP, given)
    assert shared_engine.optim_step("policies/d", STEP, {"main": 4.0}).step == 1
    # Where every row was left out, too.
    silent = [replace(row, weights=np.zeros(row.length, np.float32)) for row in ragged_batch()]
    deferred = [replace(CE, denominator=None)]
    output = shared_engine.forward_backward("policies/d", silent, deferred, skip_inert=True)
    assert output.trained_tokens == 0
    assert shared_engine.optim_step("policies/d", STEP, {"main": 4.0}).grad_norm == 0.0


def test_adamw_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mine = {"w": torch.randn(5, 3, generator=generator)}
    reference = torch.nn.Parameter(mine["w"].clone())
    optimizer = torch.optim.AdamW([reference], lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    state = AdamWState()
    for _ in range(5):
        gradient = torch.randn(5, 3, generator=generator)
        reference.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_([reference], 1.5)
        optimizer.step()
        mine_norm = apply_step(mine, {"w": gradient}, state, AdamWStep(0.05, 0.8, 0.95, 1e-6, 0.2, 1.5))
        assert mine_norm == pytest.approx(float(norm), rel=1e-6)
    torch.testing.assert_close(mine["w"], reference.detach(), rtol=1e-5, atol=1e-6)


def test_a_bfloat16_base_has_float32_masters(make_engine: MakeEngine) -> None:
    engine = make_engine(dtype="bfloat16")
    policy = engine.create_policy("policies/a", SPEC, seed=0)
    train(engine, "policies/a", steps=1)
    assert {parameter.dtype for parameter in policy.parameters.values()} == {torch.float32}
    assert engine.base.output[0].dtype == torch.bfloat16
