"""Passes by slices and rows end to end: what runs in between, and how rows are laid out, changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch, sample
from services.trainer.tests.engine.conftest import SPEC, MakeEngine
from torch.utils._python_dispatch import TorchDispatchMode

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import Component, CrossEntropy, Ppo
from opentinker_trainer.domain.plan import PlanSettings
from opentinker_trainer.domain.tuning import AdamWStep
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinker_trainer.engine.objective import BackwardOutput
from opentinker_trainer.engine.packing import NAME, PackedRow, unseen_mask

PPO = Component("main", Ppo(), 40.0)
ROWS = ragged_batch()
OTHERS = [sample(5, 9, 100 + seed) for seed in range(6)]


def bits(engine: TorchEngine, policy: str) -> dict[str, bytes]:
    return {name: value.contiguous().numpy().tobytes() for name, value in gradient_of(engine, policy).items()}


@pytest.fixture(scope="module", params=[1, 2], ids=["one_lane", "two_lanes"])
def sliced(make_engine: MakeEngine, request: pytest.FixtureRequest) -> TorchEngine:
    """Slices are as small as can be: a micro-batch in each lane."""
    engine = make_engine(token_budget=32, slice_tokens=1, lanes=request.param)
    for name in ("a", "b"):
        engine.create_policy(name, SPEC, seed=1)
        # B is not zero any more.
        engine.forward_backward(name, OTHERS, [PPO])
        engine.optim_step(name, AdamWStep(0.05))
    return engine


def reset(engine: TorchEngine, *policies: str) -> None:
    for policy in policies:
        engine._policies[policy].gradients = {}


def test_interleaved_slices_give_the_bits_of_a_pass_alone(sliced: TorchEngine) -> None:
    alone = {}
    for name, rows in (("a", ROWS), ("b", OTHERS)):
        reset(sliced, name)
        output = sliced.forward_backward(name, rows, [PPO])
        alone[name] = (bits(sliced, name), output.loss_sums, output.metrics)
    reset(sliced, "a", "b")
    left = {
        "a": sliced.begin_forward_backward("a", ROWS, [PPO]),
        "b": sliced.begin_forward_backward("b", OTHERS, [PPO]),
    }
    assert min(left.values()) >= 2
    while left:
        for name in list(left):
            # Nothing is the policy's before its last slice.
            assert not sliced._policies[name].gradients
            output = sliced.advance(name)
            left[name] -= 1
            assert (output is None) == (left[name] > 0)
            if isinstance(output, BackwardOutput):
                assert (bits(sliced, name), output.loss_sums, output.metrics) == alone[name]
                del left[name]


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_size_of_a_slice_changes_no_bit(make_engine: MakeEngine, lanes: int) -> None:
    found = []
    for slice_tokens in (1, 64, 100_000):
        engine = make_engine(token_budget=32, slice_tokens=slice_tokens, lanes=lanes)
        engine.create_policy("p", SPEC, seed=1)
        slices = engine.begin_forward_backward("p", ROWS, [PPO])
        assert (slices == 1) == (slice_tokens == 100_000)
        engine._advance_to_the_end("p")
        found.append(bits(engine, "p"))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("end", ["step", "restore", "begin"])
def test_a_pass_that_is_left_open_has_changed_nothing(sliced: TorchEngine, end: str, tmp_path: Path) -> None:
    reset(sliced, "a")
    sliced.forward_backward("a", OTHERS, [PPO])
    before = bits(sliced, "a")
    sliced.save_state("a", tmp_path)
    sliced.begin_forward_backward("a", ROWS, [PPO])
    assert sliced.advance("a") is None
    assert bits(sliced, "a") == before
    if end == "begin":
        sliced.begin_forward("a", OTHERS[:1])
        assert sliced.advance("a") is not None
        assert bits(sliced, "a") == before
    elif end == "restore":
        sliced.load_state("a", tmp_path)
        assert bits(sliced, "a") == before
    else:
        sliced.optim_step("a", AdamWStep(0.0))
    with pytest.raises(ServiceError, match="no open pass"):
        sliced.advance("a")


def test_a_request_of_which_nothing_is_left_takes_one_slice(sliced: TorchEngine) -> None:
    silent = [sample(4, 3, 1, advantage=0.0)]
    assert sliced.begin_forward_backward("a", silent, [PPO], skip_inert=True) == 1
    output = sliced.advance("a")
    assert isinstance(output, BackwardOutput)
    assert output.trained_tokens == 0


def test_packed_rows_do_not_see_each_other(make_engine: MakeEngine) -> None:
    """What a row gets does not depend on what lies before it."""
    engine = make_engine(token_budget=10_000)
    engine.create_policy("p", SPEC, seed=1)
    row = sample(4, 6, 3)
    alone = engine.forward("p", [row]).scores[0].logprobs
    for companions in ([sample(30, 20, 8)], [sample(30, 20, 9), sample(9, 9, 1)]):
        packed = engine.forward("p", [*companions, row]).scores[-1].logprobs
        assert float(abs(packed - alone).max()) < 1e-5


@pytest.mark.parametrize("kind", ["sliding", "eager", "deaf"])
def test_models_that_cannot_pack_are_padded(
    tiny_model_dir: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documented rule: the same results from padded rows of single samples."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    if kind == "sliding":
        model.config.use_sliding_window = True
        model.config.sliding_window = 8
        model.config.layer_types = ["sliding_attention"] * model.config.num_hidden_layers
    model.save_pretrained(tmp_path)
    if kind == "deaf":
        layers = transformers.models.qwen3.modeling_qwen3.Qwen3Attention
        original = layers.forward

        def without_rows(self: Any, *args: Any, packed_rows: object = None, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        monkeypatch.setattr(layers, "forward", without_rows)

    def gradient(plan: PlanSettings) -> dict[str, torch.Tensor]:
        attention = "eager" if kind == "eager" else "sdpa"
        engine = TorchEngine(
            EngineSettings(tmp_path, "m", attention=attention, compute=ComputeSettings(plan))
        )
        assert not engine._compute._settings.plan.pack
        assert engine._compute._settings.plan.share_prefix == (kind != "sliding" and plan.share_prefix)
        assert engine.base.model.config._attn_implementation == attention
        engine.create_policy("p", SPEC, seed=1)
        engine.forward_backward("p", ROWS, [PPO])
        return gradient_of(engine, "p")

    one = gradient(PlanSettings(max_rows=1, share_prefix=False))
    many = gradient(PlanSettings())
    assert largest(one) > 1e-3
    assert largest_difference(one, many) < 1e-6


def test_a_model_that_was_not_made_ready_fails_and_does_not_mix_rows(make_engine: MakeEngine) -> None:
    decoder = make_engine(pack=False).base.decoder
    assert decoder.config._attn_implementation != NAME
    with pytest.raises(RuntimeError):
        decoder(
            input_ids=torch.arange(1, 6)[None],
            position_ids=torch.tensor([[0, 1, 2, 0, 1]]),
            attention_mask=unseen_mask(5),
            packed_rows=[PackedRow(3, None), PackedRow(2, None)],
            use_cache=False,
        )


class Largest(TorchDispatchMode):
    """Remembers the most rows of any tensor that is as wide as the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.t.default:
            return result  # a view of the weight
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return result


def test_logits_never_exceed_the_chunk(make_engine: MakeEngine) -> None:
    """B115: forwards, backwards and with entropy, whatever the length of the rows."""
    engine = make_engine(token_budget=10_000, logit_rows=16)
    engine.create_policy("p", SPEC, seed=1)
    rows = [sample(4, 60, seed) for seed in range(4)]
    with Largest(engine.base.vocab_size) as seen:
        engine.forward("p", rows)
        engine.forward_backward("p", rows, [PPO, Component("ce", CrossEntropy(), None)])
    assert seen.rows == 16
