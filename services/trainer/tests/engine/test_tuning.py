"""What a policy can be beside its kind: a value head, an adapted output layer, recomputed activations."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch, sample
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, LoraSpec, TuningSpec
from opentinker_trainer.engine.checkpointing import decoder_layers
from opentinker_trainer.engine.core import TorchEngine
from opentinkerapi.runtime.reasons import Reason

CE = Component("main", CrossEntropy(), denominator=10.0)
STEP = AdamWStep(learning_rate=1e-2)
NAME = "policies/t"
HEAD = LoraSpec(4, 8.0, ("lm_head", "q_proj"))
VALUED: list[TuningSpec] = [LoraSpec(4, 8.0, ("q_proj",), value_head=True), FullSpec(value_head=True)]
KINDS = pytest.mark.parametrize("spec", VALUED, ids=["lora", "full"])


def train(engine: TorchEngine, name: str = NAME, steps: int = 2) -> None:
    for _ in range(steps):
        engine.forward_backward(name, ragged_batch(), [CE])
        engine.optim_step(name, STEP)


def set_head(engine: TorchEngine) -> tuple[np.ndarray, float]:
    """Give the value head weights; these."""
    parameters = engine._policies[NAME].parameters
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        weight = torch.randn(parameters["value_head.weight"].shape, generator=generator)
        parameters["value_head.weight"].copy_(weight)
        parameters["value_head.bias"].fill_(0.25)
    return weight[0].numpy(), 0.25


@KINDS
def test_values_come_from_the_column_that_predicts(
    make_engine: MakeEngine, tiny_model_dir: Path, spec: TuningSpec
) -> None:
    engine = make_engine()
    engine.create_policy(NAME, spec, seed=0)
    rows = [sample(4, 6, 9), *ragged_batch()]
    fresh = engine.forward(NAME, rows).scores
    assert all(score.values is not None and not score.values.any() for score in fresh)
    weight, bias = set_head(engine)
    values = engine.forward(NAME, rows).scores[0].values
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(rows[0].token_ids[None].astype(np.int64))).last_hidden_state[0]
    expected = hidden.numpy() @ weight + bias
    assert values is not None
    np.testing.assert_allclose(values[4:], expected[3:-1], atol=1e-5)
    assert not values[:4].any()
    base = engine.forward(NAME, rows, use_base_model=True)
    assert base.scores[0].values is None


@KINDS
def test_a_value_head_is_state_and_no_part_of_what_is_exported(
    make_engine: MakeEngine, tmp_path: Path, spec: TuningSpec
) -> None:
    engine = make_engine()
    policy = engine.create_policy(NAME, spec, seed=0)
    train(engine)
    # A policy loss does not move it.
    assert not policy.parameters["value_head.weight"].any()
    set_head(engine)
    values = engine.forward(NAME, ragged_batch()).scores[0].values
    for name in engine.export(NAME, tmp_path / "export"):
        if name.endswith(".safetensors"):
            assert not [key for key in load_file(tmp_path / "export" / name) if "value_head" in key]
    assert "value_head.safetensors" in engine.save_state(NAME, tmp_path / "state")
    policy = engine.create_policy(NAME, spec, seed=3)
    engine.load_state(NAME, tmp_path / "state")
    restored = engine.forward(NAME, ragged_batch()).scores[0].values
    assert values is not None
    assert restored is not None
    np.testing.assert_array_equal(restored, values)
    # Exported weights start a policy whose head is new.
    engine.load_state(NAME, tmp_path / "export", weights_only=True)
    assert not policy.parameters["value_head.weight"].any()
    # A head that has nowhere to go, or that is missing, is refused.
    (tmp_path / "state" / "value_head.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ServiceError, match=r"no value_head\.safetensors"):
        engine.load_state(NAME, tmp_path / "state")


def logits_of(model: torch.nn.Module, row: Sample) -> torch.Tensor:
    ids = torch.tensor(row.token_ids[None].astype(np.int64))
    logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_an_adapter_of_the_output_layer_means_the_same_to_peft(
    make_engine: MakeEngine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """With embeddings tied to it, which stay as they are."""
    engine = make_engine(logit_rows=4)
    before = engine.base_digest()
    engine.create_policy("policies/other", SPEC, seed=1)
    policy = engine.create_policy(NAME, HEAD, seed=0)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in policy.parameters} == {"lm_head", "q_proj"}
    untouched = engine.forward("policies/other", ragged_batch()).scores[3].logprobs
    bare = engine.forward(NAME, ragged_batch(), use_base_model=True).scores[3].logprobs
    train(engine, steps=3)
    head = {name: value for name, value in policy.parameters.items() if ".lm_head." in name}
    assert sorted(name.rpartition("lora_")[2] for name in head) == ["A.weight", "B.weight"]
    assert largest({k: v for k, v in head.items() if "lora_B" in k}) > 1e-3
    engine.export(NAME, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [
        "lm_head",
        "q_proj",
    ]
    row = sample(4, 6, 9)
    mine = engine.forward(NAME, [row]).scores[0].logprobs
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    theirs = logits_of(peft.PeftModel.from_pretrained(base, tmp_path), row).detach().numpy()
    np.testing.assert_allclose(mine[4:], theirs[3:], atol=1e-4)
    # The others never see it.
    again = engine.forward("policies/other", ragged_batch()).scores[3].logprobs
    np.testing.assert_array_equal(again, untouched)
    off = engine.forward(NAME, ragged_batch(), use_base_model=True).scores[3].logprobs
    np.testing.assert_array_equal(off, bare)
    engine.drop_policy(NAME)
    np.testing.assert_array_equal(
        engine.forward("policies/other", ragged_batch()).scores[3].logprobs, untouched
    )
    assert engine.base_digest() == before
    # And a slot used again trains (B87).
    engine.create_policy(NAME, HEAD, seed=0)
    engine.forward_backward(NAME, ragged_batch(), [CE])
    gradient = gradient_of(engine, NAME)
    assert float(gradient["base_model.model.lm_head.lora_B.weight"].abs().max()) > 0


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_gradients_of_an_adapted_output_layer_are_those_of_peft(
    make_engine: MakeEngine, tiny_model_dir: Path
) -> None:
    engine = make_engine(logit_rows=4)
    policy = engine.create_policy(NAME, HEAD, seed=0)
    train(engine, steps=1)
    engine.forward_backward(NAME, [sample(4, 6, 9)], [CE])
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=["lm_head", "q_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(base, config)
    theirs = {
        name.replace(".default.", "."): weight
        for name, weight in model.named_parameters()
        if ".lora_" in name
    }
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(policy.parameters[name])
    (-logits_of(model, sample(4, 6, 9))[3:].sum() / 10.0).backward()
    expected = {name: weight.grad for name, weight in theirs.items()}
    assert largest_difference(gradient_of(engine, NAME), expected) < 2e-6


def test_options_that_give_an_adapter_another_meaning_are_refused(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """B86: an adapter scaled otherwise must not load as if it were not."""
    engine = make_engine()
    engine.create_policy(NAME, HEAD, seed=0)
    engine.export(NAME, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for key, value in {"use_rslora": True, "alpha_pattern": {"q_proj": 1}, "modules_to_save": ["x"]}.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ServiceError, match=key) as caught:
            engine.load_state(NAME, tmp_path, weights_only=True)
        assert caught.value.reason is Reason.INVALID_WEIGHTS


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd keeps for backward passes, weights apart."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self.size_bytes = 0
        self._seen: set[int] = set()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and not isinstance(tensor, torch.nn.Parameter):
            self._seen.add(storage.data_ptr())
            self.size_bytes += storage.nbytes()
        return tensor


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_recomputed_activations_are_the_same_and_are_not_kept(make_engine: MakeEngine, full: bool) -> None:
    """What autograd keeps between the passes falls; every number stays."""
    engine = make_engine()
    rows = [sample(64, 192, seed) for seed in range(2)]
    results = []
    for flag in (False, True):
        spec = (
            FullSpec(activation_checkpointing=flag)
            if full
            else LoraSpec(8, 16.0, SPEC.target_modules, activation_checkpointing=flag)
        )
        engine.create_policy(NAME, spec, seed=0)
        train(engine, steps=1)
        kept = Kept()
        with kept:
            output = engine.forward_backward(NAME, rows, [CE])
        results.append((kept.size_bytes, output, gradient_of(engine, NAME)))
    (plain, first, gradient), (less, second, again) = results
    assert less < 0.6 * plain
    assert first.loss_sums == second.loss_sums
    assert largest_difference(gradient, again) <= 1e-6 * max(1.0, largest(gradient))
    assert engine.forward(NAME, rows).scores[0].logprobs.any()
    # Nothing of it is left in a base that others use.
    for layer in decoder_layers(engine.base.model):
        assert "forward" not in vars(layer)
