"""The pipe to a worker: frames of two little-endian lengths, a JSON header and raw blobs.

The worker's side is `opentinker.environments.frames`; the host may not import the client, so the few lines
stand in both, and a test plays one against the other.
"""

import json
import struct
from asyncio import StreamReader
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = struct.Struct("<II")
MAX_FRAME_BYTES = 64 * 1024 * 1024
_CHUNK = 1 << 18

Frame = tuple[dict[str, Any], list[bytes]]

_dump = json.JSONEncoder(separators=(",", ":")).encode


def encode(header: Mapping[str, Any]) -> bytes:
    """The bytes of a frame without blobs: requests have none."""
    text = _dump(header).encode()
    return PREFIX.pack(len(text), 0) + text


class FrameReader:
    """Takes all frames that have arrived at once, so that a busy pipe costs one read for many."""

    def __init__(self, stream: StreamReader) -> None:
        self._stream = stream
        self._rest = b""

    async def read(self) -> list[Frame]:
        """The next frames; none at the end of the stream. ValueError for what is no frame."""
        while True:
            data = await self._stream.read(_CHUNK)
            if not data:
                return []
            if len(self._rest) > _CHUNK:
                # A large frame in parts: not looked at before all of it is there.
                data = await self._whole(data)
            self._rest += data
            if found := list(self._take()):
                return found

    async def _whole(self, data: bytes) -> bytes:
        parts = [data]
        missing = _size(self._rest) - len(self._rest) - len(data)
        while missing > 0 and (data := await self._stream.read(_CHUNK)):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _take(self) -> Iterator[Frame]:
        start, rest = 0, self._rest
        while len(rest) - start >= PREFIX.size:
            end = start + _size(rest, start)
            if len(rest) < end:
                break
            header_bytes, _ = PREFIX.unpack_from(rest, start)
            start += PREFIX.size
            yield _frame(rest[start : start + header_bytes], rest[start + header_bytes : end])
            start = end
        self._rest = rest[start:]


def _size(data: bytes, start: int = 0) -> int:
    header_bytes, tail_bytes = PREFIX.unpack_from(data, start)
    if header_bytes + tail_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {header_bytes + tail_bytes} bytes is over {MAX_FRAME_BYTES}")
    return int(PREFIX.size + header_bytes + tail_bytes)


def _frame(text: bytes, tail: bytes) -> Frame:
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("a frame's header must be a JSON object")
    blobs: list[bytes] = []
    start = 0
    for length in header.pop("blobs", ()):
        blobs.append(tail[start : start + length])
        start += length
    return header, blobs
