"""Reads a LoRA adapter in PEFT layout into float32 tensors, in the order of the model's layers.

The directory has been validated by the front (`domain/adapter_layout.py`): keys, shapes, rank and alpha
are known to be right. What is checked here again is cheap and would otherwise kill an engine.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One linear layer's update: `scale * lora_b @ lora_a`.

    `name` is the layer's module path (`model.layers.0.self_attn.q_proj`), `lora_a` is [rank, in],
    `lora_b` is [out, rank], both float32.
    """

    name: str
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """All updated layers of one adapter, ordered by layer so that fused layers load together."""

    rank: int
    modules: tuple[LoraModule, ...]


def read_lora(directory: Path) -> LoraWeights:
    """Load `adapter_model.safetensors` and `adapter_config.json` of `directory`.

    Raises ValueError if a pair is incomplete, FileNotFoundError if a file is missing.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    rank = int(config["r"])
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    scale = float(config["lora_alpha"]) / divisor
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, matrix = _split(key)
        pairs.setdefault(name, {})[matrix] = tensor.to(torch.float32).contiguous()
    modules = []
    for name in sorted(pairs, key=layer_order):
        pair = pairs[name]
        if set(pair) != {"A", "B"}:
            raise ValueError(f"adapter has only lora_{'/'.join(sorted(pair))} for {name}")
        modules.append(LoraModule(name, pair["A"], pair["B"], scale))
    return LoraWeights(rank, tuple(modules))


def layer_order(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts layer 2 before layer 10 and keeps one layer's parts together."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _split(key: str) -> tuple[str, str]:
    for matrix in ("A", "B"):
        suffix = f".lora_{matrix}.weight"
        if key.startswith(PREFIX) and key.endswith(suffix):
            return key[len(PREFIX) : -len(suffix)], matrix
    raise ValueError(f"unknown adapter tensor {key!r}")
