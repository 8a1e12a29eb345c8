"""A policy's state as files: safetensors and JSON, written by the engine, named and moved by the front.

    adapter_model.safetensors, adapter_config.json   an adapter in PEFT layout (float32), or
    model.safetensors, config.json, …                all weights in Hugging Face layout (float32)
    value_head.safetensors                           the value head, where there is one
    optimizer.safetensors                            moments, "first|<name>" and "second|<name>"
    gradient.safetensors                             accumulated gradient, "<bucket>|<name>", if there is any
    engine.json                                      counters and the random generator

What is larger than a shard is cut into numbered files with an index.
"""

import base64
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.engine.adapter_files import check_shapes
from opentinker_trainer.engine.policy import Policy
from opentinker_trainer.engine.tensor_files import TensorFiles, Writer
from opentinker_trainer.engine.weights import HEAD_BIAS, HEAD_WEIGHT, Gradient
from opentinkerapi.runtime.reasons import Reason

VALUE_HEAD = "value_head.safetensors"
OPTIMIZER, GRADIENT = "optimizer", "gradient"
COUNTERS = "engine.json"
_SEPARATOR = "|"


def save_state(policy: Policy, writer: Writer) -> None:
    """Write everything needed to go on. Collective."""
    policy.weights.save(writer, exact=True)
    head = {name: tensor.detach().cpu() for name, tensor in _value_head(policy).items()}
    if head:
        writer.write(VALUE_HEAD, partial(save_file, head))
    moments = {"first": policy.optimizer.first, "second": policy.optimizer.second}
    _write(policy, OPTIMIZER, moments, writer)
    _write(policy, GRADIENT, policy.gradients, writer)
    counters = {
        "steps": policy.steps,
        "consecutive_skips": policy.consecutive_skips,
        "optimizer_steps": policy.optimizer.steps,
        "buckets": sorted(policy.gradients),
        "generator": base64.b64encode(policy.generator.get_state().numpy().tobytes()).decode(),
    }
    writer.write_json(COUNTERS, counters)


def load_state(policy: Policy, directory: Path, *, weights_only: bool, drop_gradient: bool) -> None:
    """Replace the policy's state by that of `directory`, all of it or nothing.

    With `weights_only` the optimizer starts new. The accumulated gradient is replaced too: by none with
    `weights_only` or `drop_gradient`. Weights that come without a value head leave the policy's as it is new.
    ServiceError INVALID_WEIGHTS if names or shapes do not fit the policy.
    """
    weights = policy.weights.load(directory)
    weights |= _load_value_head(policy, directory, weights_only=weights_only)
    moments: dict[str, Gradient] = {"first": {}, "second": {}}
    gradients: dict[str, Gradient] = {}
    counters: dict[str, Any] = {"steps": 0, "consecutive_skips": 0, "optimizer_steps": 0, "buckets": []}
    if not weights_only:
        if not (directory / COUNTERS).exists():
            text = "this checkpoint holds weights only; restore it with weights_only"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
        counters = json.loads((directory / COUNTERS).read_text())
        moments = _read(policy, OPTIMIZER, ["first", "second"], directory)
        buckets = [] if drop_gradient else counters["buckets"]
        gradients = _read(policy, GRADIENT, buckets, directory)
    with torch.no_grad():
        for name, weight in weights.items():
            policy.parameters[name].copy_(weight)
    policy.weights.changed()
    policy.optimizer.first, policy.optimizer.second = moments["first"], moments["second"]
    policy.optimizer.steps = int(counters["optimizer_steps"])
    policy.gradients = gradients
    policy.steps = int(counters["steps"])
    policy.consecutive_skips = int(counters["consecutive_skips"])
    if "generator" in counters:
        raw = bytearray(base64.b64decode(counters["generator"]))
        policy.generator.set_state(torch.frombuffer(raw, dtype=torch.uint8).clone())


def _value_head(policy: Policy) -> dict[str, Tensor]:
    return {name: policy.parameters[name] for name in (HEAD_BIAS, HEAD_WEIGHT) if name in policy.parameters}


def _load_value_head(policy: Policy, directory: Path, *, weights_only: bool) -> dict[str, Tensor]:
    head = _value_head(policy)
    path = directory / VALUE_HEAD
    if not path.exists():
        if head and not weights_only:
            text = f"there is no {VALUE_HEAD} for this policy's value head"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
        return {name: torch.zeros_like(tensor) for name, tensor in head.items()}
    if not head:
        if weights_only:
            # The weights of a critic's policy are of use without its head.
            return {}
        text = f"{VALUE_HEAD} is there, and this policy has no value head"
        raise ServiceError(Reason.INVALID_WEIGHTS, text)
    loaded = load_file(path)
    _check(policy, head, loaded)
    return loaded


def _write(policy: Policy, stem: str, sets: Mapping[str, Mapping[str, Tensor]], writer: Writer) -> None:
    """Write tensors shaped like parameters as "<set>|<name>"; no file if there are none."""
    parts = {
        f"{key}{_SEPARATOR}{name}": (name, tensor)
        for key, tensors in sets.items()
        for name, tensor in tensors.items()
    }
    if parts:
        writer.write_tensors(
            stem,
            {key: policy.weights.shape(name) for key, (name, _) in parts.items()},
            lambda key: policy.weights.whole(*parts[key]),
            lambda key: parts[key][1].dtype,
        )


def _read(policy: Policy, stem: str, keys: list[str], directory: Path) -> dict[str, Gradient]:
    """This rank's part of sets of tensors that `_write` wrote. A set that is empty has no tensors."""
    found: dict[str, Gradient] = {key: {} for key in keys}
    if not keys:
        return found
    files = TensorFiles(directory, stem)
    for key in keys:
        head = f"{key}{_SEPARATOR}"
        shapes = {name[len(head) :]: shape for name, shape in files.shapes.items() if name.startswith(head)}
        if shapes:
            check_shapes({name: policy.weights.shape(name) for name in policy.parameters}, shapes)
    for name, tensor in files.tensors():
        key, _, parameter = name.partition(_SEPARATOR)
        if key in found:
            found[key][parameter] = policy.weights.part(parameter, tensor).clone()
    return found


def _check(policy: Policy, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    check_shapes(
        {name: policy.weights.shape(name) for name in expected},
        {name: tuple(tensor.shape) for name, tensor in given.items()},
    )
