"""Many tensors as safetensors files of a bounded size: one file, or numbered shards with an index.

The names are those of Hugging Face: `stem.safetensors`, or `stem-00001-of-0000n.safetensors` with
`stem.safetensors.index.json`. Which tensor lies in which file follows from names, shapes and the bound alone.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

Shape = tuple[int, ...]
_FAILURES = (OSError, SafetensorError)


class Writer:
    """Writes files into a folder, on one of several ranks.

    What is written is put together by collective calls, which a rank that cannot write must go on to make. So
    the first failure is kept, nothing is written after it, and `finish` tells.
    """

    def __init__(self, directory: Path, max_bytes: int, *, active: bool) -> None:
        """`max_bytes` bounds one file of tensors; `active` on the rank that writes."""
        self.names: list[str] = []
        """The same on every rank."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._active = active
        self._failure: Exception | None = None
        self._attempt(lambda: directory.mkdir(parents=True, exist_ok=True))

    def write(self, name: str, work: Callable[[Path], object]) -> None:
        """Have `work` write the file of that name."""
        self.names.append(name)
        self._attempt(lambda: work(self._directory / name))

    def write_tensors(
        self,
        stem: str,
        shapes: Mapping[str, Shape],
        get: Callable[[str], Tensor | None],
        dtype: Callable[[str], torch.dtype],
    ) -> None:
        """Write tensors in name order. `get` is called once for each name on every rank; what it returns
        matters on the rank that writes.
        """
        groups = _groups(shapes, dtype, self._max_bytes)
        files = _file_names(stem, len(groups))
        for file, members in zip(files, groups, strict=True):
            tensors: dict[str, Tensor] = {}
            for name in members:
                tensor = get(name)
                if self._writing:
                    assert tensor is not None
                    tensors[name] = tensor.detach().to("cpu", dtype(name)).contiguous()
            self.write(file, partial(save_file, tensors, metadata={"format": "pt"}))
        if len(files) == 1:
            return
        size = sum(_bytes(shapes[name], dtype(name)) for name in shapes)
        places = {name: file for file, members in zip(files, groups, strict=True) for name in members}
        value = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        self.write_json(f"{stem}.safetensors.index.json", value)

    def write_json(self, name: str, value: object) -> None:
        """Write a JSON file, keys in order."""
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        self.write(name, lambda path: path.write_text(text))

    def finish(self) -> list[str]:
        """The names of all files. OSError or SafetensorError if one of them could not be written."""
        if self._failure is not None:
            raise self._failure
        return self.names

    @property
    def _writing(self) -> bool:
        return self._active and self._failure is None

    def _attempt(self, work: Callable[[], object]) -> None:
        if self._writing:
            try:
                work()
            except _FAILURES as failure:
                self._failure = failure


class TensorFiles:
    """Tensors that were written under a stem; nothing of them is read until it is asked for."""

    def __init__(self, directory: Path, stem: str) -> None:
        """ServiceError INVALID_WEIGHTS if files cannot be read; no tensors if there are no files."""
        self._directory = directory
        self._places = self._find(stem)
        self.shapes: dict[str, Shape] = {}
        for file in sorted(set(self._places.values())):
            with self._open(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (safetensors' handle is no mapping)
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        missing = sorted(self._places.keys() - self.shapes.keys())
        if missing:
            text = f"{self._places[missing[0]]} does not hold {missing[0]}, which the index says it does"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor, file by file."""
        for file in sorted(set(self._places.values())):
            with self._open(file) as opened:
                for name in sorted(opened.keys()):
                    yield name, opened.get_tensor(name)

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        with self._open(self._places[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def _find(self, stem: str) -> dict[str, str]:
        """Tensor name -> file name."""
        single = f"{stem}.safetensors"
        index = self._directory / f"{stem}.safetensors.index.json"
        if index.exists():
            try:
                places = {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
            except (ValueError, KeyError, AttributeError) as error:
                raise ServiceError(Reason.INVALID_WEIGHTS, f"{index.name} cannot be read") from error
            if any("/" in file for file in places.values()):
                raise ServiceError(Reason.INVALID_WEIGHTS, f"{index.name} names a file outside its folder")
            return places
        if not (self._directory / single).exists():
            return {}
        with self._open(single) as opened:
            return dict.fromkeys(opened.keys(), single)

    def _open(self, file: str) -> safe_open:
        try:
            return safe_open(self._directory / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ServiceError(Reason.INVALID_WEIGHTS, f"{file} cannot be read: {error}") from error


def _groups(
    shapes: Mapping[str, Shape], dtype: Callable[[str], torch.dtype], max_bytes: int
) -> list[list[str]]:
    groups: list[list[str]] = []
    size = 0
    for name in sorted(shapes):
        own = _bytes(shapes[name], dtype(name))
        if not groups or size + own > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    return groups


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
