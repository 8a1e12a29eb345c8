"""Adapters as PEFT, vLLM and this engine load them: adapter_model.safetensors with adapter_config.json."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.tuning import LoraSpec
from opentinker_trainer.engine.tensor_files import Writer
from opentinker_trainer.engine.weights import without_value_head
from opentinkerapi.runtime.reasons import Reason

ADAPTER = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_PLAIN = (
    "alpha_pattern",
    "modules_to_save",
    "rank_pattern",
    "trainable_token_indices",
    "use_dora",
    "use_rslora",
)
"""Options of PEFT that give the same files another meaning; they must be off."""


def save_adapter(
    parameters: Mapping[str, Tensor],
    spec: LoraSpec,
    base_model: str,
    targets: Sequence[str],
    writer: Writer,
    *,
    excluded: str | None = None,
) -> None:
    """Write an adapter. Equal weights give equal bytes.

    `excluded` matches modules that are no targets although their leaf names are.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in sorted(without_value_head(parameters).items())
    }
    writer.write(ADAPTER, partial(save_file, tensors))
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
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    if excluded is not None:
        config["exclude_modules"] = excluded
    writer.write_json(CONFIG, config)


def load_adapter(parameters: Mapping[str, Tensor], spec: LoraSpec, directory: Path) -> dict[str, Tensor]:
    """The weights of a PEFT directory. ServiceError INVALID_WEIGHTS unless they and their scale fit."""
    if not (directory / ADAPTER).exists() or not (directory / CONFIG).exists():
        raise ServiceError(Reason.INVALID_WEIGHTS, f"no {ADAPTER} with its {CONFIG}")
    config = json.loads((directory / CONFIG).read_text())
    for name in _PLAIN:
        if config.get(name):
            text = f"{CONFIG} has {name} set, which an adapter here does not have"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
    given = (int(config["r"]), float(config["lora_alpha"]))
    if given != (spec.rank, spec.alpha):
        text = (
            f"rank and alpha are {given[0]} and {given[1]:g} there, {spec.rank} and {spec.alpha:g} in this "
            "policy"
        )
        raise ServiceError(Reason.INVALID_WEIGHTS, text)
    weights = load_file(directory / ADAPTER)
    check_fit(without_value_head(parameters), weights)
    return weights


def check_fit(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """ServiceError INVALID_WEIGHTS naming a tensor, unless names and shapes are the same."""
    check_shapes(
        {name: tuple(tensor.shape) for name, tensor in parameters.items()},
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )


def check_shapes(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """ServiceError INVALID_WEIGHTS naming a tensor, unless names and shapes are the same."""
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            text = f"{name}: shape {given.get(name)} there, {expected.get(name)} in this policy"
            raise ServiceError(Reason.INVALID_WEIGHTS, text)
