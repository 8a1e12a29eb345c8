"""The pipe to a worker: frames of two little-endian lengths, a JSON header and raw blobs.

The worker's side is `opentinker.environments.frames`; the host may not import the client, so the few lines
stand in both, and a test plays one against the other.
"""

import json
import struct
from asyncio import IncompleteReadError, StreamReader
from collections.abc import Mapping
from typing import Any

PREFIX = struct.Struct("<II")
MAX_FRAME_BYTES = 64 * 1024 * 1024


def encode(header: Mapping[str, Any]) -> bytes:
    """The bytes of a frame without blobs: requests have none."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return PREFIX.pack(len(text), 0) + text


async def read(stream: StreamReader) -> tuple[dict[str, Any], list[bytes]] | None:
    """The next frame; None at the end of the stream. ValueError for what is no frame."""
    try:
        header_bytes, tail_bytes = PREFIX.unpack(await stream.readexactly(PREFIX.size))
        if header_bytes + tail_bytes > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {header_bytes + tail_bytes} bytes is over {MAX_FRAME_BYTES}")
        body = await stream.readexactly(header_bytes + tail_bytes)
    except IncompleteReadError:
        return None
    header = json.loads(body[:header_bytes])
    if not isinstance(header, dict):
        raise ValueError("a frame's header must be a JSON object")
    blobs: list[bytes] = []
    start = header_bytes
    for length in header.pop("blobs", ()):
        blobs.append(body[start : start + length])
        start += length
    return header, blobs
