"""Token ids with images among them, and how they travel.

An image stands at a number of places that follows from its size. In the ids these places hold the model's
placeholder, so that everything that counts or aligns tokens needs to know nothing of images; on the wire the
placeholders of an image are one chunk that carries it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

from opentinker.environments.content import Image
from opentinkerapi.data.v1 import blob_pb2, content_pb2, prompt_pb2
from opentinkerapi.runtime.images import INLINE_MAX_BYTES
from opentinkerapi.runtime.tensors import pack_ids

MESSAGE_IMAGE_BYTES = 8 * 1024 * 1024
"""Most bytes of images inline in one message, which holds 16 MiB."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among n token ids: it takes the places [start, start + token_count)."""

    start: int
    token_count: int
    image: Image

    @property
    def end(self) -> int:
        """One past its last place."""
        return self.start + self.token_count

    def shifted(self, by: int) -> "PlacedImage":
        """The same, further on."""
        return replace(self, start=self.start + by)


class Prompt(Sequence[int]):
    """Token ids of a model input, and its images. Equal to the bare ids where there are none."""

    __slots__ = ("ids", "images")

    def __init__(self, ids: Iterable[int], images: Iterable[PlacedImage] = ()) -> None:
        self.ids = tuple(ids)
        self.images = tuple(images)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.ids[index]

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Prompt):
            return self.ids == other.ids and self.images == other.images
        return isinstance(other, list | tuple) and not self.images and self.ids == tuple(other)

    def __hash__(self) -> int:
        return hash((self.ids, self.images))

    def __repr__(self) -> str:
        return f"<Prompt of {len(self.ids)} tokens, {len(self.images)} images>"


class Uploads(Protocol):
    """Where images go that are too large for a message."""

    async def upload(self, data: bytes) -> blob_pb2.BlobRef: ...


def images_of(ids: Sequence[int]) -> tuple[PlacedImage, ...]:
    """The images among the ids, where they are a Prompt with some."""
    return ids.images if isinstance(ids, Prompt) else ()


def chunks(ids: Sequence[int], images: Sequence[PlacedImage]) -> list[prompt_pb2.Chunk]:
    """As chunks of a message, every image inline; an image's placeholders become its chunk."""
    made: list[prompt_pb2.Chunk] = []

    def add_tokens(start: int, end: int) -> None:
        if start < end:
            run = prompt_pb2.TokenChunk(token_ids=pack_ids(list(ids[start:end])))
            made.append(prompt_pb2.Chunk(tokens=run))

    at = 0
    for placed in images:
        add_tokens(at, placed.start)
        image = content_pb2.Image(inline=placed.image.data, media_type=placed.image.media_type)
        chunk = prompt_pb2.ImageChunk(image=image, token_count=placed.token_count)
        made.append(prompt_pb2.Chunk(image=chunk))
        at = placed.end
    add_tokens(at, len(ids))
    return made


async def upload_large(parts: Iterable[prompt_pb2.Chunk], uploads: Uploads) -> None:
    """Upload images that are too large to travel, alone or together; their chunks then name them."""
    room = MESSAGE_IMAGE_BYTES
    for part in parts:
        image = part.image.image
        size = len(image.inline)
        if size > INLINE_MAX_BYTES or size > room:
            image.blob.CopyFrom(await uploads.upload(image.inline))
        else:
            room -= size
