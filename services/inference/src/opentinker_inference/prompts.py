"""Reads prompts from the wire: token ids, and images that are fetched, looked at and put at their places."""

import asyncio
from collections.abc import Callable, Sequence

from opentinker_inference import wire
from opentinker_inference.domain.images import PromptImage, PromptTokens
from opentinker_inference.domain.sampling import EngineInfo
from opentinker_kit.errors import ServiceError
from opentinker_kit.image_blobs import inline_images
from opentinker_kit.images import decode
from opentinker_kit.objects import ObjectStore
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.runtime.images import ImageError, ImageSettings, media_type
from opentinkerapi.runtime.reasons import Reason


class PromptReader:
    """Reads the prompts of one model."""

    def __init__(
        self,
        settings: ImageSettings | None,
        objects: ObjectStore | None,
        info: Callable[[], EngineInfo],
    ) -> None:
        """`settings` are None where the model takes no images; `info` is asked whether the engine does."""
        self._settings = settings
        self._objects = objects
        self._info = info

    async def read(self, prompt: prompt_pb2.Prompt, field: str, project: str = "") -> PromptTokens:
        """Token ids with their images, blobs among them being those of a project.

        INVALID_FIELD, naming the chunk; UNSUPPORTED_OPTION for images where model or engine takes none;
        PROMPT_TOO_LONG as soon as that is certain.
        """
        first = next((i for i, chunk in enumerate(prompt.chunks) if chunk.HasField("image")), None)
        if first is None:
            return PromptTokens(tuple(_tokens(prompt.chunks, field)))
        info = self._info()
        if self._settings is None or not info.images:
            text = "the model takes no images"
            if self._settings is not None:
                text = f"the {info.engine} engine takes no images; use engine=transformers"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=f"{field}.chunks[{first}].image")
        chunks = await inline_images(self._objects, prompt.chunks, field, project) or list(prompt.chunks)
        return await asyncio.to_thread(_mixed, chunks, field, self._settings, info.context_tokens)


def _tokens(chunks: Sequence[prompt_pb2.Chunk], field: str) -> list[int]:
    tokens: list[int] = []
    for index, chunk in enumerate(chunks):
        tokens += _run(chunk, f"{field}.chunks[{index}]")
    return tokens


def _run(chunk: prompt_pb2.Chunk, field: str) -> list[int]:
    if chunk.WhichOneof("chunk") is None:
        raise ServiceError(Reason.INVALID_FIELD, "the chunk is empty", field=field)
    return wire.token_ids(chunk.tokens.token_ids, f"{field}.tokens.token_ids")


def _mixed(
    chunks: Sequence[prompt_pb2.Chunk], field: str, settings: ImageSettings, context_tokens: int
) -> PromptTokens:
    tokens: list[int] = []
    images: list[PromptImage] = []
    for index, chunk in enumerate(chunks):
        where = f"{field}.chunks[{index}]"
        if not chunk.HasField("image"):
            tokens += _run(chunk, where)
            continue
        if len(tokens) >= context_tokens:
            # No image is decoded that cannot fit.
            text = f"the prompt has more than {len(tokens)} tokens and the context holds {context_tokens}"
            metadata = {"prompt_tokens": len(tokens) + 1, "context_tokens": context_tokens}
            raise ServiceError(Reason.PROMPT_TOO_LONG, text, field=field, metadata=metadata)
        count = _token_count(chunk.image, f"{where}.image", settings)
        images.append(PromptImage(len(tokens), count, chunk.image.image.inline))
        tokens += [settings.placeholder] * count
    return PromptTokens(tuple(tokens), tuple(images))


def _token_count(chunk: prompt_pb2.ImageChunk, field: str, settings: ImageSettings) -> int:
    image = chunk.image
    found = media_type(image.inline)
    if found and found != image.media_type:
        text = f"is {image.media_type!r} and the bytes are {found}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.image.media_type")
    try:
        count = settings.token_count(*decode(image.inline).size)
    except ImageError as error:
        raise ServiceError(Reason.INVALID_FIELD, str(error), field=f"{field}.image") from error
    if count != chunk.token_count:
        text = f"is {chunk.token_count}; an image of this size takes {count} places"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.token_count")
    return count
