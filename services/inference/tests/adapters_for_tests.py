"""Random LoRA adapters for a model directory, in PEFT layout; no torch."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model_dir: Path,
    *,
    rank: int = 4,
    alpha: float = 32.0,
    std: float = 0.05,
    seed: int = 0,
    targets: tuple[str, ...] = ALL_LINEAR,
    config: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    live_name: Callable[[str], str] = str,
) -> Path:
    """Write an adapter whose B has standard deviation `std` (0: changes nothing); returns `directory`.

    `live_name` turns a module's name in the checkpoint into the loaded model's; "" leaves it out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in load_file(model_dir / "model.safetensors").items():
        module = live_name(name.removesuffix(".weight"))
        if weight.ndim == 2 and module.rpartition(".")[2] in targets:
            out_size, in_size = weight.shape
            a = generator.standard_normal((rank, in_size)) / np.sqrt(in_size)
            b = generator.standard_normal((out_size, rank)) * std
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    tensors |= extra or {}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "base_model_name_or_path": str(model_dir),
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings | (config or {})))
    return directory


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
