"""A policy's state as files: safetensors and JSON, written by the engine, named and moved by the front.

adapter_model.safetensors, adapter_config.json   the weights in PEFT layout (float32)
optimizer.safetensors                             moments, "first|<name>" and "second|<name>"
gradient.safetensors                              accumulated gradient, "<bucket>|<name>", if there is any
engine.json                                       counters and the random generator
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.engine.adapters import Adapter
from opentinker_trainer.engine.policy import Policy
from opentinkerapi.runtime.reasons import Reason

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
GRADIENT = "gradient.safetensors"
COUNTERS = "engine.json"
_SEPARATOR = "|"


def save_adapter(adapter: Adapter, base_model: str, directory: Path) -> list[str]:
    """Write the adapter as PEFT and vLLM load it; returns the file names. Equal weights give equal bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    _save(adapter.parameters, directory / ADAPTER)
    spec = adapter.spec
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": sorted(spec.target_modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return [ADAPTER, CONFIG]


def save_state(policy: Policy, base_model: str, directory: Path) -> list[str]:
    """Write everything needed to go on; returns the file names."""
    names = save_adapter(policy.adapter, base_model, directory)
    moments = {
        f"{kind}{_SEPARATOR}{name}": value
        for kind, values in (("first", policy.optimizer.first), ("second", policy.optimizer.second))
        for name, value in values.items()
    }
    if moments:
        _save(moments, directory / OPTIMIZER)
        names.append(OPTIMIZER)
    gradients = {
        f"{bucket}{_SEPARATOR}{name}": value
        for bucket, gradient in policy.gradients.items()
        for name, value in gradient.items()
    }
    if gradients:
        _save(gradients, directory / GRADIENT)
        names.append(GRADIENT)
    counters = {
        "steps": policy.steps,
        "consecutive_skips": policy.consecutive_skips,
        "optimizer_steps": policy.optimizer.steps,
        "buckets": sorted(policy.gradients),
        "generator": base64.b64encode(policy.generator.get_state().numpy().tobytes()).decode(),
    }
    (directory / COUNTERS).write_text(json.dumps(counters, indent=2, sort_keys=True) + "\n")
    return [*names, COUNTERS]


def load_state(policy: Policy, directory: Path, *, weights_only: bool, drop_gradient: bool) -> None:
    """Replace the policy's state by that of `directory`, all of it or nothing.

    With `weights_only` the optimizer starts new. The accumulated gradient is replaced too: by none with
    `weights_only` or `drop_gradient`.
    ServiceError INVALID_WEIGHTS if names or shapes do not fit the policy.
    """
    weights = load_weights(policy.adapter, directory)
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    gradients: dict[str, dict[str, Tensor]] = {}
    counters: dict[str, Any] = {"steps": 0, "consecutive_skips": 0, "optimizer_steps": 0, "buckets": []}
    if not weights_only:
        if not (directory / COUNTERS).exists():
            text = "this checkpoint holds weights only; restore it with weights_only"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
        counters = json.loads((directory / COUNTERS).read_text())
        moments = _load(directory / OPTIMIZER)
        first, second = _part(moments, "first"), _part(moments, "second")
        saved = {} if drop_gradient else _load(directory / GRADIENT)
        buckets = [] if drop_gradient else counters["buckets"]
        gradients = {bucket: _part(saved, bucket) for bucket in buckets}
        for tensors in (first, second, *gradients.values()):
            if tensors:
                _check_fit(policy.adapter, tensors)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(weights[name])
    policy.optimizer.first, policy.optimizer.second = first, second
    policy.optimizer.steps = int(counters["optimizer_steps"])
    policy.gradients = gradients
    policy.steps = int(counters["steps"])
    policy.consecutive_skips = int(counters["consecutive_skips"])
    if "generator" in counters:
        raw = bytearray(base64.b64decode(counters["generator"]))
        policy.generator.set_state(torch.frombuffer(raw, dtype=torch.uint8).clone())


def load_weights(adapter: Adapter, directory: Path) -> dict[str, Tensor]:
    """The weights of a PEFT directory. ServiceError INVALID_WEIGHTS unless they and their scale fit."""
    if not (directory / ADAPTER).exists() or not (directory / CONFIG).exists():
        raise ServiceError(Reason.INVALID_WEIGHTS, f"no {ADAPTER} with its {CONFIG}")
    config = json.loads((directory / CONFIG).read_text())
    given = (int(config["r"]), float(config["lora_alpha"]))
    if given != (adapter.spec.rank, adapter.spec.alpha):
        text = (
            f"rank and alpha are {given[0]} and {given[1]:g} there, {adapter.spec.rank} and "
            f"{adapter.spec.alpha:g} in this policy"
        )
        raise ServiceError(Reason.INVALID_WEIGHTS, text)
    weights = load_file(directory / ADAPTER)
    _check_fit(adapter, weights)
    return weights


def _check_fit(adapter: Adapter, tensors: dict[str, Tensor]) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in adapter.parameters.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected == given:
        return
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    text = f"{wrong[0]}: shape {given.get(wrong[0])} there, {expected.get(wrong[0])} in this policy"
    raise ServiceError(Reason.INVALID_WEIGHTS, text)


def _part(tensors: dict[str, Tensor], bucket: str) -> dict[str, Tensor]:
    head = f"{bucket}{_SEPARATOR}"
    return {key[len(head) :]: tensor for key, tensor in tensors.items() if key.startswith(head)}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}, path)


def _load(path: Path) -> dict[str, Tensor]:
    return load_file(path) if path.exists() else {}
