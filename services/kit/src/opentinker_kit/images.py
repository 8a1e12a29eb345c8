"""From an encoded image to what a vision tower takes, and where its positions lie. (Needs extra `images`.)

Bit for bit what transformers' own processor for Pillow and numpy makes of it, without torchvision: the
processors that transformers prefers need it, and PyPI's does not load beside a CPU build of torch.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import PIL.ImageOps
from numpy.typing import NDArray

from opentinkerapi.runtime.images import ImageError, ImageSettings, check_size, media_type

_FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True, slots=True)
class Patches:
    """An image as a vision tower takes it."""

    values: NDArray[np.float32]
    """[patches, channels * frames * height * width of a patch], those of one position together."""
    rows: int
    columns: int
    """Patches down and across."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where an image stands among token ids: `rows * columns` positions from `start` on, row by row."""

    start: int
    rows: int
    columns: int


def decode(data: bytes) -> PIL.Image.Image:
    """The image in RGB, turned as its camera noted. ImageError if it cannot be decoded or is too large."""
    check_size(data)
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            upright = PIL.ImageOps.exif_transpose(image)
            return upright if upright.mode == "RGB" else upright.convert("RGB")
    except Exception as error:  # a damaged file can make the decoders raise anything
        raise ImageError(f"the {media_type(data)} cannot be decoded: {error}") from error


def patches(data: bytes, settings: ImageSettings) -> Patches:
    """Decode, resize, normalize, cut. ImageError as `decode`, or for an extreme aspect."""
    image = decode(data)
    size = settings.resized(*image.size)
    pixels = np.asarray(image.resize(size, resample=PIL.Image.Resampling(settings.resample)))
    # Rescaled in float64, normalized in float32: another order would differ in the last bit.
    scaled = (pixels.astype(np.float64) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.asarray(values, np.float32) for values in (settings.mean, settings.std))
    normal = ((scaled - mean) / std).transpose(2, 0, 1)
    patch, merge = settings.patch_size, settings.merge_size
    columns, rows = size[0] // patch, size[1] // patch
    shape = (3, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = normal.reshape(shape).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.repeat(cut[:, :, :, :, :, None], settings.temporal_patch_size, axis=5)
    return Patches(np.ascontiguousarray(frames.reshape(rows * columns, -1)), rows, columns)


def position_ids(length: int, grids: Sequence[Grid]) -> NDArray[np.int64]:
    """[3, length]: frame, row and column of each place, as the rotary embedding of Qwen2.5-VL counts them.

    Text counts up in all three at once. An image begins where the text before it ended; its places share the
    frame and count rows and columns; text goes on after the larger of the two.
    """
    result = np.empty((3, length), np.int64)
    at, position = 0, 0
    for grid in grids:
        before, count = grid.start - at, grid.rows * grid.columns
        result[:, at : grid.start] = position + np.arange(before)
        position += before
        places = slice(grid.start, grid.start + count)
        result[0, places] = position
        result[1, places] = position + np.repeat(np.arange(grid.rows), grid.columns)
        result[2, places] = position + np.tile(np.arange(grid.columns), grid.rows)
        position += max(grid.rows, grid.columns)
        at = grid.start + count
    result[:, at:] = position + np.arange(length - at)
    return result
