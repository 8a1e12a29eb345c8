"""Length-prefixed frames on a pipe: two little-endian lengths, a JSON header, raw blobs.

    header_bytes: u32 | blob_bytes: u32 | header (JSON object) | blobs, one after the other

The header's key "blobs" lists the length of each blob; a frame without blobs leaves it out.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

PREFIX = struct.Struct("<II")
MAX_FRAME_BYTES = 64 * 1024 * 1024

Frame = tuple[dict[str, Any], list[bytes]]

_dump = json.JSONEncoder(separators=(",", ":")).encode


def encode(header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """The bytes of one frame."""
    if blobs:
        header = {**header, "blobs": [len(blob) for blob in blobs]}
    text = _dump(header).encode()
    tail = b"".join(blobs)
    return PREFIX.pack(len(text), len(tail)) + text + tail


def decode(header: bytes, tail: bytes) -> Frame:
    """A frame from the two parts that follow its prefix."""
    fields = json.loads(header)
    blobs: list[bytes] = []
    start = 0
    for length in fields.pop("blobs", ()):
        blobs.append(tail[start : start + length])
        start += length
    return fields, blobs


def read(stream: BinaryIO) -> Frame | None:
    """The next frame of a blocking stream; None at its end, also in the middle of a frame."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    header_bytes, tail_bytes = PREFIX.unpack(prefix)
    body = stream.read(header_bytes + tail_bytes)
    if len(body) < header_bytes + tail_bytes:
        return None
    return decode(body[:header_bytes], body[header_bytes:])
