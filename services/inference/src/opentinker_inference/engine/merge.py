"""Merges a LoRA adapter into base weights, in float32, always from the pristine base.

Merging is `W + scale * B @ A`. It starts from the base checkpoint's own tensors (memory-mapped, so the
pages cost nothing until they are read) and never from weights that were merged before: a chain of
merge and un-merge drifts, a merge from the base does not.

This module knows nothing about how an engine loads tensors; it yields `(checkpoint name, tensor)`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from opentinker_inference.engine.lora import LoraWeights


class PristineBase:
    """The tensors of a model directory by name, memory-mapped and read-only."""

    def __init__(self, model_dir: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for path in sorted(model_dir.glob("*.safetensors")):
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                    self._file_of[name] = path
        if not self._file_of:
            raise FileNotFoundError(f"no safetensors files in {model_dir}")
        self._handles = {path: safe_open(path, framework="pt") for path in set(self._file_of.values())}

    def names(self) -> list[str]:
        """Every tensor name of the checkpoint, file by file."""
        return list(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype. The caller must not write to it."""
        handle: Any = self._handles[self._file_of[name]]
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor

    def merged(self, adapter: LoraWeights, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that `adapter` changes, merged and cast to `dtype`, layer by layer."""
        for module in adapter.modules:
            weight = self.tensor(f"{module.name}.weight").to(torch.float32)
            merged = torch.addmm(weight, module.lora_b, module.lora_a, alpha=module.scale)
            yield f"{module.name}.weight", merged.to(dtype)

    def cast(self, names: list[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as they are stored, cast to `dtype`."""
        for name in names:
            yield name, self.tensor(name).to(dtype)
