"""Images in prompts: transformers' numbers, the same bits whatever else runs, and what is refused."""

import asyncio
import functools
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from services.inference.tests.adapters_for_tests import ALL_LINEAR, write_adapter
from services.inference.tests.engine_helpers import collect, job, prompt_scores

from opentinker_inference.domain.adapter_layout import linear_layers
from opentinker_inference.domain.images import Images, PromptImage, PromptTokens
from opentinker_inference.domain.sampling import Completion, EngineInfo, SampleJob, ScoreJob
from opentinker_inference.engine.transformers_engine import TransformersEngine
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_inference.prompts import PromptReader
from opentinker_kit.errors import ServiceError
from opentinker_kit.images import patches
from opentinker_kit.models import image_settings
from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.safetensors_header import checkpoint_shapes
from opentinker_kit.testing.vision import png
from opentinkerapi.data.v1 import blob_pb2, content_pb2, prompt_pb2
from opentinkerapi.runtime.images import INLINE_MAX_BYTES, ImageSettings, image_chunk
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_ids

RED, GREEN, WIDE = png((255, 0, 0)), png((0, 255, 0)), png((0, 0, 255), 112, 84)
"""4, 4 and 12 places."""
LONG = png((9, 99, 199), 224, 224)
"""64 places."""


@pytest.fixture(scope="module")
def settings(tiny_vision_model_dir: Path) -> ImageSettings:
    found = image_settings(tiny_vision_model_dir)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def adapter(tiny_vision_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def live_name(module: str) -> str:
        return "" if module.startswith("visual.") else module.replace("model.", "model.language_model.", 1)

    directory = tmp_path_factory.mktemp("adapter")
    excluded = {"exclude_modules": r"(.*\.)?visual\..*"}
    return write_adapter(directory, tiny_vision_model_dir, live_name=live_name, config=excluded)


async def started(model_dir: Path, adapter: Path | None, mode: str = "adapter") -> TransformersEngine:
    config = EngineConfig("transformers", model_dir, 1024, serving_mode=mode, threads=1, max_rows=16)
    engine = TransformersEngine(config)
    info = await engine.start()
    assert info.images
    if adapter is not None:
        await engine.load(Weights("v1", adapter, 4))
    return engine


@pytest.fixture
async def engine(tiny_vision_model_dir: Path, adapter: Path) -> AsyncIterator[TransformersEngine]:
    running = await started(tiny_vision_model_dir, adapter)
    yield running
    await running.close()


def prompt(settings: ImageSettings, *parts: int | bytes, seed: int = 0) -> PromptTokens:
    """Each number stands for that many random tokens, each picture for itself."""
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, bytes):
            data = patches(part, settings)
            count = data.rows * data.columns // 4
            images.append(PromptImage(len(ids), count, part))
            ids += [settings.placeholder] * count
        else:
            ids += generator.integers(0, 256, part).tolist()
    return PromptTokens(tuple(ids), tuple(images))


def asked(name: str, given: PromptTokens, **options: Any) -> SampleJob:
    return replace(job(name, prompt=given.ids, **options), images=given.images)


@functools.lru_cache(maxsize=4)
def reference_model(model_dir: Path, adapter: Path | None) -> Any:
    import peft
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    return model.eval()


def reference(
    model_dir: Path, adapter: Path | None, settings: ImageSettings, ids: Sequence[int], images: Images
) -> np.ndarray:
    """Logprob of each token after the first, by transformers' own way: pixels, grids, its own positions."""
    import torch

    model = reference_model(model_dir, adapter)
    tokens = torch.tensor([list(ids)])
    inputs: dict[str, Any] = {"input_ids": tokens}
    if images:
        given = [patches(image.data, settings) for image in images]
        types = torch.zeros_like(tokens)
        for image in images:
            types[0, image.start : image.start + image.token_count] = 1
        inputs |= {
            "pixel_values": torch.from_numpy(np.concatenate([each.values for each in given])),
            "image_grid_thw": torch.tensor([[1, each.rows, each.columns] for each in given]),
            "mm_token_type_ids": types,
        }
    with torch.no_grad():
        scores = torch.log_softmax(model(**inputs, use_cache=False).logits[0, :-1], dim=-1)
    return scores.gather(1, tokens[0, 1:, None])[:, 0].numpy()


PROMPTS: list[tuple[int | bytes, ...]] = [(5, RED, 3), (5, RED, 3, WIDE, 6), (7,), (500, LONG, 20, LONG, 9)]


@pytest.mark.parametrize("mode", ["adapter", "merged"])
async def test_logprobs_are_those_of_transformers(
    tiny_vision_model_dir: Path, adapter: Path, settings: ImageSettings, mode: str
) -> None:
    """Of prompts (also where an image lies across two chunks) and of what is sampled after them."""
    engine = await started(tiny_vision_model_dir, adapter, mode)
    for number, parts in enumerate(PROMPTS):
        given = prompt(settings, *parts, seed=number)
        request = asked(f"r{number}", given, weights="v1", n=2, max_tokens=6, prompt_logprobs=True)
        completions = await collect(engine, request)
        scores = await prompt_scores(engine, replace(request, request_id=f"again{number}"))
        for completion in completions.values():
            ids = [*given.ids, *completion.token_ids]
            expected = reference(tiny_vision_model_dir, adapter, settings, ids, given.images)
            np.testing.assert_allclose(scores[1:], expected[: len(given.ids) - 1], atol=1e-4)
            np.testing.assert_allclose(completion.logprobs, expected[len(given.ids) - 1 :], atol=1e-4)
    given = prompt(settings, *PROMPTS[1], seed=1)
    score = ScoreJob("s", "v1", (given.ids, given.ids[:4]), 1.0, (given.images, ()))
    whole, text = await engine.score(score)
    expected = reference(tiny_vision_model_dir, adapter, settings, given.ids, given.images)
    np.testing.assert_allclose(whole[1:], expected, atol=1e-4)
    np.testing.assert_allclose(text[1:], expected[:3], atol=1e-4)
    await engine.close()


def outcome(completions: dict[int, Completion]) -> dict[int, tuple[tuple[int, ...], tuple[float, ...]]]:
    return {index: (c.token_ids, c.logprobs) for index, c in sorted(completions.items())}


async def test_alone_and_among_others_are_bitwise_equal(
    engine: TransformersEngine, settings: ImageSettings
) -> None:
    requests = [
        asked(
            f"r{number}",
            prompt(settings, *parts, seed=number),
            n=(1, 3)[number % 2],
            weights=("", "v1")[number % 2],
            seed=100 * number,
            max_tokens=(4, 30)[number % 2],
        )
        for number, parts in enumerate([*PROMPTS, (3, GREEN, 1), (60, RED, 2, GREEN), (1, WIDE)])
    ]
    alone = [outcome(await collect(engine, request)) for request in requests]
    engine._batcher.forget(None)
    together = await asyncio.gather(*(collect(engine, request) for request in reversed(requests)))
    assert [outcome(each) for each in reversed(together)] == alone


async def test_prompts_of_equal_ids_and_other_images_share_nothing(
    engine: TransformersEngine, settings: ImageSettings
) -> None:
    """A cache of prompts by their token ids would answer the second with the first one's picture."""
    red, green = (prompt(settings, 5, picture, 3) for picture in (RED, GREEN))
    assert red.ids == green.ids
    first = outcome(await collect(engine, asked("a", red)))
    second = outcome(await collect(engine, asked("b", green)))
    again = outcome(await collect(engine, asked("c", red)))
    assert first == again
    assert first[0][1] != second[0][1]


async def test_a_placeholder_outside_an_image_is_a_token_like_any_other(
    engine: TransformersEngine, settings: ImageSettings
) -> None:
    given = prompt(settings, 5, RED, 3)
    sampled = PromptTokens((*given.ids, settings.placeholder, 65), given.images)
    (scores,) = await engine.score(ScoreJob("s", "", (sampled.ids,), 1.0, (sampled.images,)))
    (shorter,) = await engine.score(ScoreJob("s", "", (given.ids,), 1.0, (given.images,)))
    assert np.isfinite(scores[1:]).all()
    np.testing.assert_allclose(scores[1 : len(given.ids)], shorter[1:], atol=1e-5)


def test_adapters_change_the_language_model_only(tiny_vision_model_dir: Path) -> None:
    """Files call the language model's layers otherwise than a loaded model does."""
    layers = linear_layers(checkpoint_shapes(tiny_vision_model_dir))
    assert sorted({name.rpartition(".")[2] for name in layers}) == sorted(ALL_LINEAR)
    assert all(name.startswith("model.language_model.layers.") for name in layers)
    assert len(layers) == 2 * len(ALL_LINEAR)


# What the front reads


def info(images: bool = True) -> EngineInfo:
    engine = "transformers" if images else "vllm"
    return EngineInfo(engine, "float32", "adapter", 8, 256, 320, True, images=images)


def wire_prompt(*parts: tuple[int, ...] | prompt_pb2.Chunk) -> prompt_pb2.Prompt:
    chunks = [
        part
        if isinstance(part, prompt_pb2.Chunk)
        else prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(part)))
        for part in parts
    ]
    return prompt_pb2.Prompt(chunks=chunks)


def by_blob(data: bytes, count: int) -> prompt_pb2.Chunk:
    blob = blob_pb2.BlobRef(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    image = content_pb2.Image(blob=blob, media_type="image/png")
    return prompt_pb2.Chunk(image=prompt_pb2.ImageChunk(image=image, token_count=count))


async def test_a_prompt_is_read_with_its_images_inline_and_by_blob(settings: ImageSettings) -> None:
    store = MemoryObjectStore()
    await store.put(f"blobs/{hashlib.sha256(WIDE).hexdigest()}", WIDE)
    reader = PromptReader(settings, store, info)
    given = wire_prompt((1, 2), image_chunk(RED, "image/png", 4), (3,), by_blob(WIDE, 12), (4,))
    sent = given.SerializeToString(deterministic=True)
    read = await reader.read(given, "prompt")
    pad = settings.placeholder
    assert read.ids == (1, 2, *[pad] * 4, 3, *[pad] * 12, 4)
    assert [(image.start, image.token_count, image.data) for image in read.images] == [
        (2, 4, RED),
        (7, 12, WIDE),
    ]
    assert given.SerializeToString(deterministic=True) == sent
    assert await PromptReader(None, None, info).read(wire_prompt((1, 2), (3,)), "p") == PromptTokens(
        (1, 2, 3)
    )


@pytest.mark.parametrize(
    ("part", "reason", "field", "text"),
    [
        (image_chunk(RED, "image/png", 5), Reason.INVALID_FIELD, "image.token_count", "takes 4 places"),
        (image_chunk(RED[:90], "image/png", 4), Reason.INVALID_FIELD, "image.image", "cannot be decoded"),
        (image_chunk(b"", "image/png", 4), Reason.INVALID_FIELD, "image.image", "none of"),
        (image_chunk(RED, "image/webp", 4), Reason.INVALID_FIELD, "image.image.media_type", "image/png"),
        (
            image_chunk(RED + bytes(INLINE_MAX_BYTES), "image/png", 4),
            Reason.INVALID_FIELD,
            "image.image.inline",
            "send a BlobRef",
        ),
        (by_blob(GREEN, 4), Reason.BLOB_NOT_FOUND, "image.image.blob", "no blob"),
        (prompt_pb2.Chunk(), Reason.INVALID_FIELD, "", "empty"),
    ],
)
async def test_bad_images_are_refused_by_field(
    settings: ImageSettings, part: prompt_pb2.Chunk, reason: Reason, field: str, text: str
) -> None:
    reader = PromptReader(settings, MemoryObjectStore(), info)
    given = wire_prompt((1,), image_chunk(RED, "image/png", 4), part)
    with pytest.raises(ServiceError, match=text) as caught:
        await reader.read(given, "prompt")
    assert caught.value.reason is reason
    assert caught.value.field == f"prompt.chunks[2].{field}".rstrip(".")


async def test_images_are_refused_where_model_or_engine_takes_none(settings: ImageSettings) -> None:
    given = wire_prompt((1,), image_chunk(RED, "image/png", 4))
    for reader, text in (
        (PromptReader(None, None, info), "the model takes no images"),
        (PromptReader(settings, None, lambda: info(images=False)), "the vllm engine takes no images"),
    ):
        with pytest.raises(ServiceError, match=text) as caught:
            await reader.read(given, "prompt")
        assert caught.value.reason is Reason.UNSUPPORTED_OPTION
        assert caught.value.field == "prompt.chunks[1].image"


async def test_a_prompt_that_cannot_fit_is_refused_before_its_images_are_decoded(
    settings: ImageSettings,
) -> None:
    reader = PromptReader(settings, None, info)
    given = wire_prompt(tuple(range(256)), image_chunk(b"never looked at", "image/png", 4))
    with pytest.raises(ServiceError) as caught:
        await reader.read(given, "prompt")
    assert caught.value.reason is Reason.PROMPT_TOO_LONG


async def test_vllm_refuses_the_model_by_name(tiny_vision_model_dir: Path) -> None:
    from opentinker_inference.engine.vllm_engine import VllmEngine

    with pytest.raises(ServiceError, match="use engine=transformers") as caught:
        await VllmEngine(EngineConfig("vllm", tiny_vision_model_dir, 1024)).start()
    assert caught.value.reason is Reason.UNSUPPORTED_COMBINATION
