"""Versions that replace every weight: checked before an engine sees them, served merged, undone whole."""

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file
from services.inference.tests.engine_helpers import reference_logprobs
from services.inference.tests.serving import Client, publish, publish_random, serving

from opentinker_kit.testing.models import build_tiny_qwen3
from opentinkerapi.runtime.errors import DataLoss, FailedPrecondition, InvalidArgument

PROMPT = tuple(b"2 + 2 = ")
Tensors = dict[str, np.ndarray]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    options = {"serving_mode": "merged", "threads": 1, "context_tokens": 128}
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("merged"), **options) as started:
        yield started


def write_model(
    directory: Path, model_dir: Path, change: Callable[[Tensors], None] = lambda _: None, **config: object
) -> Path:
    """What a trainer publishes of a fully trained policy: here two shards of a changed model."""
    directory.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, directory)
    settings = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(settings))
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


async def test_a_whole_model_is_served_and_undone(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    me, lora = client.named("whole"), client.named("beside")
    other = build_tiny_qwen3(tmp_path / "other", seed=9)
    await publish(me.objects, me.policy, 0, write_model(tmp_path / "v0", tiny_model_dir), facts=FULL)
    first = write_model(tmp_path / "v1", other)
    await publish(me.objects, me.policy, 1, first, facts=FULL)
    # The same weights by the other way: a local path instead of the object store (B54).
    await publish(me.objects, me.policy, 2, first, facts=FULL, local=True, upload=False)
    adapter = await publish_random(lora.objects, lora.policy, 1, tiny_model_dir, tmp_path)

    base = await me.sample("base", seed=3, n=4)
    zero = await me.sample("zero", seed=3, n=4, version=0)
    assert zero.outcome() == base.outcome()
    one = await me.sample("one", seed=3, n=4, version=1)
    assert one.logprobs() == pytest.approx(reference_logprobs(first, None, PROMPT, one.ids()), abs=1e-4)
    assert one.outcome() != base.outcome()
    assert (await me.sample("two", seed=3, n=4, version=2)).outcome() == one.outcome()
    # An adapter after it is merged into the base, not into what was there.
    merged = await lora.sample("lora", seed=3, version=1)
    want = reference_logprobs(tiny_model_dir, adapter, PROMPT, merged.ids())
    assert merged.logprobs() == pytest.approx(want, abs=1e-4)
    await me.sample("one again", version=1)
    assert (await me.sample("base again", seed=3, n=4)).outcome() == base.outcome()


FULL: dict[str, object] = {"kind": "full"}


async def test_what_is_not_this_model_is_refused_by_name(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    me = client.named("wrong")
    name = "model.layers.1.mlp.up_proj.weight"

    def drop(tensors: Tensors) -> None:
        del tensors[name]

    def add(tensors: Tensors) -> None:
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name]

    def widen(tensors: Tensors) -> None:
        tensors[name] = np.zeros((3, 64), np.float32)

    def poison(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3, 3] = np.inf

    def integers(tensors: Tensors) -> None:
        tensors[name] = tensors[name].astype(np.int32)

    cases = [
        (drop, {}, f"{name} is missing"),
        (add, {}, "layers.9"),
        (widen, {}, f"{name} has shape [3, 64]"),
        (poison, {}, f"{name} holds NaN or infinity"),
        (integers, {}, f"{name} is I32"),
        (lambda _: None, {"num_hidden_layers": 3}, "num_hidden_layers = 3"),
        (lambda _: None, {"rms_norm_eps": 1e-3}, "rms_norm_eps"),
    ]
    before = await me.sample("before", seed=1)
    for version, (change, config, text) in enumerate(cases):
        path = write_model(tmp_path / str(version), tiny_model_dir, change, **config)
        await publish(me.objects, me.policy, version, path, facts=FULL)
        error = await me.failure(me.request(f"r{version}", version=version))
        assert isinstance(error, InvalidArgument), (version, error)
        assert text in error.message, (version, error.message)
    good = write_model(tmp_path / "good", tiny_model_dir)
    await publish(me.objects, me.policy, 20, good, facts=FULL)
    key = f"{me.policy}/versions/20/model-00002-of-00002.safetensors"
    data = bytearray(await me.objects.get(key))
    data[-1] ^= 1
    await me.objects.put(key, bytes(data))
    assert isinstance(await me.failure(me.request("flipped", version=20)), DataLoss)
    # And the server goes on, with the weights it had.
    assert (await me.sample("after", seed=1)).outcome() == before.outcome()
    await publish(me.objects, me.policy, 21, good, facts=FULL)
    assert (await me.sample("good", version=21)).ids()


async def test_a_tied_output_layer_is_not_merged(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    me = client.named("tied")
    await publish_random(me.objects, me.policy, 1, tiny_model_dir, tmp_path, extra=output_adapter())
    error = await me.failure(me.request("r1", version=1))
    assert isinstance(error, FailedPrecondition)
    assert "lm_head" in error.message


def output_adapter() -> Tensors:
    generator = np.random.default_rng(4)
    return {
        "base_model.model.lm_head.lora_A.weight": generator.standard_normal((4, 64)).astype(np.float32) / 8,
        "base_model.model.lm_head.lora_B.weight": generator.standard_normal((320, 4)).astype(np.float32) / 20,
    }
