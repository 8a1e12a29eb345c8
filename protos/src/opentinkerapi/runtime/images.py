"""Images among tokens, as far as that goes without decoding them: how many positions one takes, and where.

A model that sees images gives each one a number of positions, which follows from the image's size and the
model's own files. Client and servers compute it here, from a header and some JSON, so that a prompt's length
is known before anything is decoded. Decoding is `opentinker_kit.images`.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentinkerapi.data.v1 import content_pb2, prompt_pb2

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
MODEL_FILE = "config.json"
FILES = (PREPROCESSOR_FILE, PROCESSOR_FILE)
"""What `ImageSettings` reads of a model beside its config.json; either is enough."""

MODEL_TYPES = ("qwen2_5_vl",)
"""Models whose images are understood, by `model_type`."""

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
INLINE_MAX_BYTES = 2 * 1024 * 1024
"""What an encoded image may take in a message; a larger one is uploaded and named by a BlobRef."""
MAX_BYTES = 16 * 1024 * 1024
"""Largest encoded image."""
MAX_PIXELS = 1 << 25
"""Most pixels before resizing: a small file can hold an image that fills the memory."""

_MAX_ASPECT = 200
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Steps of the processor that are always taken here.
_FIXED = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


class ImageError(ValueError):
    """An image, or a model's image settings, cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What a model does with an image: resize, cut into patches, merge these into positions."""

    placeholder: int
    """Token id that stands at each position of an image."""
    patch_size: int = 14
    """Pixels of a patch's side."""
    temporal_patch_size: int = 2
    """Frames of a patch; an image is repeated that often."""
    merge_size: int = 2
    """Patches along each side that make one position."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    """Bounds of the resized image."""
    mean: tuple[float, ...] = _CLIP_MEAN
    std: tuple[float, ...] = _CLIP_STD
    """Of the colour channels, after rescaling."""
    rescale_factor: float = 1 / 255
    resample: int = 3
    """Pillow's number of the filter; 3 is bicubic."""

    @classmethod
    def of_files(cls, files: Mapping[str, bytes]) -> "ImageSettings | None":
        """The settings in a model's files, by name; None if it is no model whose images are understood.

        ImageError if a setting has a value that cannot be honoured.
        """
        config = _json(files, MODEL_FILE)
        processor = _json(files, PREPROCESSOR_FILE) or _json(files, PROCESSOR_FILE).get("image_processor")
        if config.get("model_type") not in MODEL_TYPES or not isinstance(processor, dict):
            return None
        for name in _FIXED:
            if processor.get(name, True) is not True:
                raise ImageError(f"{PREPROCESSOR_FILE} sets {name} to {processor[name]!r}; it must be true")
        size = processor.get("size") or {}
        given: dict[str, Any] = {
            "min_pixels": processor.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": processor.get("max_pixels") or size.get("longest_edge"),
            "mean": processor.get("image_mean"),
            "std": processor.get("image_std"),
        }
        names = ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor", "resample")
        given |= {name: processor.get(name) for name in names}
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value is not None
        }
        return cls(placeholder=int(config["image_token_id"]), **known)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing: whole positions, within the bounds, the aspect about as it was.

        As transformers' Qwen2VLImageProcessor rounds them. ImageError for a side 200 times the other.
        """
        if max(width, height) > _MAX_ASPECT * min(width, height):
            raise ImageError(
                f"{width} x {height} pixels: one side is more than {_MAX_ASPECT} times the other"
            )
        unit = self.patch_size * self.merge_size
        new = [round(side / unit) * unit for side in (width, height)]
        if new[0] * new[1] > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            new = [max(unit, math.floor(side / shrink / unit) * unit) for side in (width, height)]
        elif new[0] * new[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            new = [math.ceil(side * grow / unit) * unit for side in (width, height)]
        return new[0], new[1]

    def token_count(self, width: int, height: int) -> int:
        """Positions that an image of that size takes; the same for its width and height exchanged."""
        columns, rows = self.resized(width, height)
        unit = self.patch_size * self.merge_size
        return (columns // unit) * (rows // unit)


def check_size(data: bytes) -> tuple[int, int]:
    """Width and height of an encoded image, from its header. ImageError if it is no image or too large."""
    if len(data) > MAX_BYTES:
        raise ImageError(f"{len(data)} bytes are over the {MAX_BYTES} that an image may have")
    try:
        width, height = _size(data)
    except (struct.error, IndexError):
        raise ImageError("the image ends within its header") from None
    if width < 1 or height < 1:
        raise ImageError(f"the image has {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{width} x {height} pixels are over the {MAX_PIXELS} that an image may have")
    return width, height


def media_type(data: bytes) -> str:
    """What the bytes are, by how they begin; "" for none of `MEDIA_TYPES`."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return ""


def image_chunk(data: bytes, kind: str, token_count: int) -> prompt_pb2.Chunk:
    """An image with its bytes in the message."""
    image = content_pb2.Image(inline=data, media_type=kind)
    return prompt_pb2.Chunk(image=prompt_pb2.ImageChunk(image=image, token_count=token_count))


def _size(data: bytes) -> tuple[int, int]:
    kind = media_type(data)
    if kind == "image/png":
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    if kind == "image/jpeg":
        return _jpeg_size(data)
    if kind == "image/webp":
        return _webp_size(data)
    raise ImageError(f"the bytes are none of {', '.join(MEDIA_TYPES)}")


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """From the frame header, the first segment of a kind SOF0 to SOF15 (ITU T.81, B.2.2)."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ImageError("the JPEG has no frame header where one must be")
        marker = data[at + 1]
        if marker == 0xFF:  # padding before a marker
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        elif marker == 0x01 or 0xD0 <= marker <= 0xD9:  # markers without a segment
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _webp_size(data: bytes) -> tuple[int, int]:
    """From the first chunk of the container: lossy, lossless or extended (RFC 9649)."""
    kind = data[12:16]
    if kind == b"VP8X":
        return (int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("the WebP begins with an unknown chunk")


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = json.loads(files[name]) if name in files else {}
    return value if isinstance(value, dict) else {}
