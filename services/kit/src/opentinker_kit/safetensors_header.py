"""Reads what a safetensors file holds without loading it: names, shapes, and where the bytes are."""

import json
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_MAX_HEADER_BYTES = 100_000_000
_BF16_BITS = np.dtype("<u2")
_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": _BF16_BITS}
_BLOCK = 1 << 22
"""Values looked at together, so that a whole model costs no memory."""


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by name. INVALID_WEIGHTS if the file is no safetensors file."""
    return {name: tuple(entry["shape"]) for name, entry in _entries(path)[1]}


def check_finite(path: Path, dtypes: Collection[str]) -> None:
    """INVALID_WEIGHTS unless every tensor has one of `dtypes` (F32, BF16, F16) and no NaN and infinity."""
    start, entries = _entries(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for name, entry in entries:
        if entry["dtype"] not in dtypes:
            raise _invalid(path, f"{name} is {entry['dtype']}; expected {' or '.join(sorted(dtypes))}")
        begin, end = entry["data_offsets"]
        kind = _NUMPY[entry["dtype"]]
        raw = data[start + begin : start + end]
        if raw.size != int(np.prod(entry["shape"])) * kind.itemsize:
            raise _invalid(path, f"{name} is cut short")
        values: NDArray[Any] = raw.view(dtype=kind)
        if not all(_finite(values[at : at + _BLOCK]) for at in range(0, values.size, _BLOCK)):
            raise _invalid(path, f"{name} holds NaN or infinity")


def _finite(values: NDArray[Any]) -> bool:
    if values.dtype == _BF16_BITS:
        return not bool(((values & 0x7F80) == 0x7F80).any())
    # The sum is not finite if any value is not; overflow of finite values is ruled out by float64.
    return bool(np.isfinite(values.sum(dtype=np.float64)))


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
