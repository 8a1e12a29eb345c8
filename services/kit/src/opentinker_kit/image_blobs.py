"""Images that came by reference: their bytes are put where an engine looks for them."""

import hashlib
from collections.abc import Iterable

from opentinker_kit.blob_keys import blob_key
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinkerapi.data.v1 import blob_pb2, prompt_pb2
from opentinkerapi.runtime.images import INLINE_MAX_BYTES, MAX_BYTES
from opentinkerapi.runtime.reasons import Reason

Chunks = list[prompt_pb2.Chunk]


async def inline_images(
    objects: ObjectStore | None, chunks: Iterable[prompt_pb2.Chunk], field: str, project: str = ""
) -> Chunks | None:
    """The chunks with the bytes of every image in them; None where they all had them already. Blobs are those
    of `project`.

    The given ones are not changed: a log keeps what was sent. ServiceError INVALID_FIELD, under `field`, for
    an image too large to be inline or too large at all; BLOB_NOT_FOUND, DIGEST_MISMATCH.
    """
    result: Chunks = []
    fetched = 0
    for index, chunk in enumerate(chunks):
        image = chunk.image.image
        where = f"{field}.chunks[{index}].image"
        if len(image.inline) > INLINE_MAX_BYTES:
            text = (
                f"an image of {len(image.inline)} bytes is over the {INLINE_MAX_BYTES} that go inline; "
                "upload it and send a BlobRef"
            )
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.image.inline")
        if image.WhichOneof("source") == "blob":
            copy = prompt_pb2.Chunk()
            copy.CopyFrom(chunk)
            copy.image.image.inline = await _read(objects, image.blob, f"{where}.image.blob", project)
            fetched += 1
            result.append(copy)
        else:
            result.append(chunk)
    return result if fetched else None


async def _read(objects: ObjectStore | None, blob: blob_pb2.BlobRef, field: str, project: str) -> bytes:
    if len(blob.sha256) != 64 or not set(blob.sha256) <= set("0123456789abcdef"):
        text = "sha256 is no lower-case hex SHA-256"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{field}.sha256")
    if objects is None:
        text = "this server was started without an object store; send images inline"
        raise ServiceError(Reason.BLOB_NOT_FOUND, text, field=field)
    key = blob_key(blob.sha256, project)
    info = await objects.head(key)
    if info is None:
        raise ServiceError(Reason.BLOB_NOT_FOUND, f"there is no blob {blob.sha256}", field=field)
    if info.size_bytes > MAX_BYTES:
        text = f"an image of {info.size_bytes} bytes is over the {MAX_BYTES} that one may have"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)
    data = await objects.get(key)
    if hashlib.sha256(data).hexdigest() != blob.sha256:
        raise ServiceError(Reason.DIGEST_MISMATCH, f"blob {blob.sha256} holds other bytes", field=field)
    return data
