"""Images in train samples: transformers' own numbers, whatever the cut; what is malformed is refused."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_load_file
from services.trainer.tests.builders import gradient_of, largest, largest_difference

from opentinker_kit.errors import ServiceError
from opentinker_kit.images import patches
from opentinker_kit.models import image_settings
from opentinker_kit.testing.vision import png
from opentinker_trainer import wire
from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.domain.plan import PlanSettings, plan
from opentinker_trainer.domain.samples import Limits, Sample, check_samples
from opentinker_trainer.domain.tuning import AdamWStep, FullSpec, LoraSpec
from opentinker_trainer.engine.compute import ComputeSettings
from opentinker_trainer.engine.core import EngineSettings, TorchEngine
from opentinkerapi.data.v1 import prompt_pb2, train_sample_pb2
from opentinkerapi.runtime.images import ImageSettings, image_chunk, media_type
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats, pack_ids

RED, GREEN, WIDE = png((255, 0, 0)), png((0, 255, 0)), png((0, 0, 255), 112, 84)
"""4, 4 and 12 places."""
TARGETS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SPEC = LoraSpec(8, 16.0, TARGETS)
MakeEngine = Callable[..., TorchEngine]


@pytest.fixture(scope="module")
def settings(tiny_vision_model_dir: Path) -> ImageSettings:
    found = image_settings(tiny_vision_model_dir)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def make(tiny_vision_model_dir: Path) -> MakeEngine:
    def build(**plan: Any) -> TorchEngine:
        compute = ComputeSettings(PlanSettings(**plan))
        return TorchEngine(EngineSettings(tiny_vision_model_dir, "tiny", compute=compute))

    return build


def message(
    settings: ImageSettings, *parts: int | bytes, answer: int = 5, seed: int = 0, advantage: float = 1.0
) -> train_sample_pb2.TrainSample:
    """A row: each number stands for that many random tokens, each picture for itself, then the answer."""
    generator = np.random.default_rng(seed)
    chunks: list[prompt_pb2.Chunk] = []
    length = 0

    def tokens(count: int) -> prompt_pb2.Chunk:
        ids = generator.integers(0, 256, count)
        return prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(ids)))

    for part in parts:
        if isinstance(part, bytes):
            data = patches(part, settings)
            count = data.rows * data.columns // 4
            chunks.append(image_chunk(part, media_type(part), count))
        else:
            count = part
            chunks.append(tokens(count))
        length += count
    chunks.append(tokens(answer))
    mask = np.arange(length + answer) >= length
    behavior = np.where(mask, -5.5 + 0.3 * generator.standard_normal(mask.size), 0.0)
    return train_sample_pb2.TrainSample(
        sample_id=f"row {seed}",
        chunks=chunks,
        loss_mask=bytes(mask.astype(np.uint8)),
        behavior_logprobs=pack_floats(behavior),
        advantages=pack_floats(np.where(mask, advantage, 0.0)),
    )


def batch(settings: ImageSettings) -> list[Sample]:
    """Rows with no, one and two images; some share a prompt, images included, others differ in it only."""
    rows = [
        message(settings, 5, RED, 3, seed=1),
        message(settings, 5, GREEN, 3, seed=1, advantage=-1.0),
        message(settings, 5, RED, 3, WIDE, 6, answer=9, seed=2, advantage=0.5),
        message(settings, 12, seed=3),
        message(settings, 12, seed=3, answer=7, advantage=-0.7),
        message(settings, WIDE, 1, seed=4, answer=2, advantage=-0.3),
        message(settings, 3, RED, 1, RED, 4, seed=5, answer=3),
        message(settings, 40, seed=6, answer=11, advantage=0.2),
    ]
    return wire.samples_of(rows, settings)


def reference(model: Any, sample: Sample, settings: ImageSettings) -> np.ndarray:
    """Logprobs at the loss tokens by transformers' own way: pixels, grids, and its own positions."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {"input_ids": ids}
    if sample.images:
        given = [patches(image.data, settings) for image in sample.images]
        types = torch.zeros_like(ids)
        for image in sample.images:
            types[0, image.start : image.start + image.token_count] = 1
        inputs |= {
            "pixel_values": torch.from_numpy(np.concatenate([each.values for each in given])),
            "image_grid_thw": torch.tensor([[1, each.rows, each.columns] for each in given]),
            "mm_token_type_ids": types,
        }
    with torch.no_grad():
        scores = torch.log_softmax(model(**inputs, use_cache=False).logits[0, :-1], dim=-1)
    picked = scores.gather(1, ids[0, 1:, None])[:, 0].numpy()
    return picked[sample.loss_mask[1:]]


def run(engine: TorchEngine, samples: list[Sample], spec: LoraSpec = SPEC, **options: Any) -> Any:
    """An own policy whose B is not zero, then one pass."""
    policy = engine.create_policy("policies/p", spec, seed=3)
    generator = np.random.default_rng(5)
    for name, parameter in policy.parameters.items():
        if ".lora_B." in name:
            values = 0.05 * generator.standard_normal(tuple(parameter.shape))
            parameter.data.copy_(parameter.new_tensor(values))
    component = Component("main", Ppo(), denominator=float(sum(s.loss_tokens for s in samples)))
    return engine.forward_backward("policies/p", samples, [component], **options)


def test_logprobs_are_those_of_transformers(
    make: MakeEngine, settings: ImageSettings, tiny_vision_model_dir: Path
) -> None:
    """Also right after images, with several of them, and beside rows without any."""
    engine = make(token_budget=100_000)
    engine.create_policy("policies/p", SPEC, seed=0)
    samples = batch(settings)
    output = engine.forward("policies/p", samples)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        tiny_vision_model_dir, dtype=torch.float32
    ).eval()
    for index, (sample, score) in enumerate(zip(samples, output.scores, strict=True)):
        expected = reference(model, sample, settings)
        np.testing.assert_allclose(score.logprobs[sample.loss_mask], expected, atol=1e-5, err_msg=str(index))
    # The same tokens after another picture: it is looked at.
    red, green = (output.scores[i].logprobs[samples[i].loss_mask] for i in (0, 1))
    assert np.abs(red - green).max() > 0.05


def test_any_cut_gives_the_same_loss_and_gradient(make: MakeEngine, settings: ImageSettings) -> None:
    samples = batch(settings)
    whole = make(token_budget=100_000, share_prefix=False, pack=False)
    expected = run(whole, samples)
    gradient = gradient_of(whole, "policies/p")
    assert largest(gradient) > 1e-3
    for cut in ({"max_rows": 1}, {"max_rows": 2}, {"token_budget": 64}, {"share_prefix": True, "pack": True}):
        engine = make(**cut)
        output = run(engine, samples)
        assert largest_difference(gradient_of(engine, "policies/p"), gradient) < 1e-6, cut
        assert output.loss_sums["main"] == pytest.approx(expected.loss_sums["main"], rel=1e-5), cut
        for score, other in zip(output.scores, expected.scores, strict=True):
            np.testing.assert_allclose(score.logprobs, other.logprobs, atol=1e-5)


def test_rows_with_images_share_nothing_and_are_not_packed(settings: ImageSettings) -> None:
    """A group of one picture included: its rows have the same ids, and so would rows of another picture."""
    rows = [message(settings, 20, RED, 3, seed=1, answer=2) for _ in range(3)]
    rows += [message(settings, 20, seed=2, answer=2) for _ in range(3)]
    samples = wire.samples_of(rows, settings)
    batches = plan(samples, range(6), PlanSettings(share_prefix=True, pack=True))
    members = [row.members for each in batches for row in each.rows]
    assert sorted(members) == [(0,), (1,), (2,), (3, 4, 5)]
    for each in batches:
        assert not (each.packed and any(samples[i].images for row in each.rows for i in row.members))


def test_activations_can_be_computed_again(make: MakeEngine, settings: ImageSettings) -> None:
    samples = batch(settings)
    engine = make()
    run(engine, samples)
    gradient = gradient_of(engine, "policies/p")
    run(engine, samples, spec=replace(SPEC, activation_checkpointing=True))
    assert largest_difference(gradient_of(engine, "policies/p"), gradient) < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_ranks_give_the_same(tiny_vision_model_dir: Path, tmp_path: Path) -> None:
    from services.trainer.tests.engine import image_ranks

    from opentinker_trainer.engine.ranks import Ranks

    expected = image_ranks.compute(tiny_vision_model_dir, Ranks())
    results = tmp_path / "results.safetensors"
    command = [sys.executable, "-m", image_ranks.__name__]
    ranks = [
        subprocess.Popen(
            [*command, str(tiny_vision_model_dir), str(tmp_path / "store"), str(results)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[4],
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(200) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    found = torch_load_file(results)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = 1e-6 if name.startswith("gradient/") else 1e-5
        np.testing.assert_allclose(found[name], tensor, atol=bound, err_msg=name)


def test_order_does_not_matter(make: MakeEngine, settings: ImageSettings) -> None:
    samples = batch(settings)
    engine = make()
    expected = run(engine, samples)
    gradient = gradient_of(engine, "policies/p")
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = run(engine, [samples[i] for i in order])
    assert largest_difference(gradient_of(engine, "policies/p"), gradient) < 1e-6
    for at, index in enumerate(order):
        np.testing.assert_allclose(shuffled.scores[at].logprobs, expected.scores[index].logprobs, atol=1e-5)


def test_a_placeholder_outside_an_image_is_a_token_like_any_other(
    make: MakeEngine, settings: ImageSettings
) -> None:
    """A policy can sample it; its row must not be taken for one with a missing image."""
    (sample,) = wire.samples_of([message(settings, 5, RED, 3, seed=1)], settings)
    ids = sample.token_ids.copy()
    ids[-2] = settings.placeholder
    check_samples([replace(sample, token_ids=ids)], Limits(320, 1024, settings))
    engine = make()
    engine.create_policy("policies/p", SPEC, seed=0)
    first = engine.forward("policies/p", [replace(sample, token_ids=ids)]).scores[0].logprobs
    plain = engine.forward("policies/p", [sample]).scores[0].logprobs
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first[:-2], plain[:-2])


def test_an_adapter_leaves_the_vision_tower_alone(
    make: MakeEngine, settings: ImageSettings, tmp_path: Path
) -> None:
    """Leaf names of its layers repeat those of the language model."""
    engine = make()
    before = engine.base_digest()
    assert set(engine.base.linear_layers) == set(TARGETS)
    assert {count for count, _, _ in engine.base.linear_layers.values()} == {2}
    run(engine, batch(settings))
    engine.optim_step("policies/p", AdamWStep(1e-2))
    names = engine._policies["policies/p"].parameters
    assert names
    assert all(".language_model.layers." in name for name in names)
    assert engine.base_digest() == before
    engine.export("policies/p", tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert "adapter_model.safetensors" in files


def test_peft_loads_the_adapter_as_it_is(
    make: MakeEngine, settings: ImageSettings, tiny_vision_model_dir: Path, tmp_path: Path
) -> None:
    import peft

    engine = make()
    samples = batch(settings)
    run(engine, samples)
    engine.export("policies/p", tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        tiny_vision_model_dir, dtype=torch.float32
    )
    loaded = peft.PeftModel.from_pretrained(model, str(tmp_path)).eval()
    adapted = [name for name, _ in loaded.named_parameters() if ".lora_A." in name]
    assert len(adapted) == 2 * len(TARGETS)
    scores = engine.forward("policies/p", samples[2:3]).scores[0].logprobs
    np.testing.assert_allclose(
        scores[samples[2].loss_mask], reference(loaded, samples[2], settings), atol=1e-5
    )


def test_all_weights_but_the_tower_can_be_trained(
    make: MakeEngine, settings: ImageSettings, tiny_vision_model_dir: Path, tmp_path: Path
) -> None:
    """Exported files have the base's names, and transformers loads them as they are."""
    engine = make()
    samples = batch(settings)
    policy = engine.create_policy("policies/f", FullSpec(), seed=0)
    assert not any(".visual." in name for name in policy.parameters)
    component = Component("main", Ppo(), denominator=50.0)
    before = engine.forward("policies/f", samples)
    engine.forward_backward("policies/f", samples, [component])
    assert engine.optim_step("policies/f", AdamWStep(1e-3)).grad_norm > 0
    after = engine.forward("policies/f", samples)
    assert np.abs(before.scores[2].logprobs - after.scores[2].logprobs).max() > 1e-3
    engine.export("policies/f", tmp_path)
    base, exported = (load_file(d / "model.safetensors") for d in (tiny_vision_model_dir, tmp_path))
    assert base.keys() == exported.keys()
    changed = {name for name in base if not np.array_equal(base[name], exported[name])}
    assert changed
    assert not any(name.startswith("visual.") for name in changed)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for sample, score in zip(samples, after.scores, strict=True):
        expected = reference(model, sample, settings)
        np.testing.assert_allclose(score.logprobs[sample.loss_mask], expected, atol=1e-5)
    other = engine.create_policy("policies/g", FullSpec(), seed=1)
    engine.save_state("policies/f", tmp_path / "state")
    engine.load_state("policies/g", tmp_path / "state")
    same = [torch.equal(other.parameters[n], policy.parameters[n]) for n in policy.parameters]
    assert all(same)


def refused(rows: list[train_sample_pb2.TrainSample], settings: ImageSettings | None) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        check_samples(wire.samples_of(rows, settings), Limits(320, 1024, settings))
    return caught.value


def test_a_model_without_images_refuses_them(settings: ImageSettings) -> None:
    error = refused([message(settings, 4), message(settings, 4, RED)], None)
    assert error.reason is Reason.UNSUPPORTED_OPTION
    assert error.field == "samples[1].chunks[1].image"


@pytest.mark.parametrize(
    ("edit", "field", "text"),
    [
        ("count", "chunks[1].image.token_count", "an image of this size takes 4 places"),
        ("no count", "chunks[1].image.token_count", "at least 1 place"),
        ("huge count", "loss_mask", "entries for at least"),
        ("bytes", "chunks[1].image.image", "cannot be decoded"),
        ("empty", "chunks[1].image.image", "none of image/png"),
        ("large", "chunks[1].image.image", "pixels are over"),
        ("type", "chunks[1].image.image.media_type", "the bytes are image/png"),
        ("mask", "loss_mask", "loss_mask[6] is 1 at a place of the image in chunk 1"),
    ],
)
def test_bad_images_are_refused_by_index_and_field(
    settings: ImageSettings, edit: str, field: str, text: str
) -> None:
    bad = message(settings, 5, RED, 3, seed=1)
    image = bad.chunks[1].image
    match edit:
        case "count":
            image.token_count = 5
            bad.chunks[2].tokens.token_ids = pack_ids([1, 2])
        case "no count":
            image.token_count = 0
        case "huge count":
            image.token_count = 2**31 - 1
        case "bytes":
            image.image.inline = RED[: len(RED) // 2]
        case "empty":
            image.image.inline = b""
        case "large":
            image.image.inline = RED[:16] + (1 << 15).to_bytes(4, "big") * 2 + RED[24:]
        case "type":
            image.image.media_type = "image/jpeg"
        case "mask":
            bad.loss_mask = bytes([0] * 6 + [1] + list(bad.loss_mask[7:]))
    error = refused([message(settings, 4), bad], settings)
    assert error.reason is Reason.INVALID_SAMPLE
    assert error.field == f"samples[1].{field}"
    assert text in error.message
    assert error.metadata["index"] in (1, "1")
