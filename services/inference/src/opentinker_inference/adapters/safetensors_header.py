"""Reads what a safetensors file holds without loading it: names, shapes, and where the bytes are."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_MAX_HEADER_BYTES = 100_000_000
_FLOAT32 = np.dtype("<f4")


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by name. INVALID_WEIGHTS if the file is no safetensors file."""
    return {name: tuple(entry["shape"]) for name, entry in _entries(path)[1]}


def check_finite_float32(path: Path) -> None:
    """INVALID_WEIGHTS unless every tensor is float32 without NaN and infinity."""
    start, entries = _entries(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for name, entry in entries:
        if entry["dtype"] != "F32":
            raise _invalid(path, f"{name} is {entry['dtype']}; adapters are float32 (F32)")
        begin, end = entry["data_offsets"]
        values = data[start + begin : start + end].view(_FLOAT32)
        if values.size != int(np.prod(entry["shape"])):
            raise _invalid(path, f"{name} is cut short")
        # The sum is not finite if any value is not; overflow of finite values is ruled out by float64.
        if not np.isfinite(values.sum(dtype=np.float64)):
            raise _invalid(path, f"{name} holds NaN or infinity")


def checkpoint_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all safetensors files of a model directory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        shapes |= read_shapes(path)
    return shapes


def _entries(path: Path) -> tuple[int, list[tuple[str, dict[str, Any]]]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise _invalid(path, "its header is too long")
            header = json.loads(file.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        for _, entry in entries:
            entry["dtype"], entry["shape"], entry["data_offsets"]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _invalid(path, "it cannot be read") from error
    return 8 + length, entries


def _invalid(path: Path, text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_WEIGHTS, f"{path.name} is no valid safetensors file: {text}")
