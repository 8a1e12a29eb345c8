"""Whether a LoRA adapter fits the base model: checked before any engine sees it.

An adapter that loads but does nothing, or at the wrong scale, is the worst kind: every key must be one that
will be used, in the shape that will be used, and every option of its configuration one that is honoured.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_kit.weight_configs import unhonoured_option
from opentinkerapi.runtime.reasons import Reason

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor of a safetensors file, by name."""

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_TOWER = re.compile(r"(model\.)?visual\.")
_LANGUAGE = re.compile(r"^model\.(?!language_model\.)")


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a valid adapter says of itself; `scale` is what `B @ A` is multiplied by."""

    rank: int
    scale: float
    modules: tuple[str, ...]


def linear_layers(checkpoint: Shapes) -> dict[str, tuple[int, int]]:
    """Module path to (out, in) of each weight matrix inside a checkpoint's blocks: what an adapter can
    change everywhere. The output layer lies outside; whether it can be adapted depends on how it is served.

    Of a vision-language model only the language model counts: the tower is frozen. Its layers have other
    names in files than in memory, and adapters use the latter.
    """
    vision = any(_TOWER.match(name) for name in checkpoint)
    layers = {}
    for name, shape in checkpoint.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or not any(part.isdigit() for part in module.split(".")):
            continue
        if vision:
            if _TOWER.match(module):
                continue
            module = _LANGUAGE.sub("model.language_model.", module)
        layers[module] = (shape[0], shape[1])
    return layers


def check_adapter(
    config: Mapping[str, Any], tensors: Shapes, layers: Mapping[str, tuple[int, int]], max_rank: int
) -> AdapterFacts:
    """INVALID_WEIGHTS, naming what does not fit, unless every tensor will be used as it is meant."""
    rank, scale = _rank_and_scale(config, max_rank)
    option = unhonoured_option(config)
    if option is not None:
        raise _invalid(f"adapter_config.json sets {option}, which is not supported")
    pairs: dict[str, set[str]] = {}
    unknown: list[str] = []
    for key, shape in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None or found["module"] not in layers:
            unknown.append(key)
            continue
        out_size, in_size = layers[found["module"]]
        want = (rank, in_size) if found["matrix"] == "A" else (out_size, rank)
        if tuple(shape) != want:
            raise _invalid(f"{key} has shape {list(shape)}, the model and rank {rank} need {list(want)}")
        pairs.setdefault(found["module"], set()).add(found["matrix"])
    if unknown:
        some = ", ".join(sorted(unknown)[:3])
        raise _invalid(
            f"{len(unknown)} tensors belong to no linear layer of the base model (expected "
            f"base_model.model.<layer>.lora_A.weight and lora_B): {some}"
        )
    if not pairs:
        raise _invalid("the adapter has no tensors")
    targets = config.get("target_modules")
    if isinstance(targets, list):
        unnamed = next((module for module in sorted(pairs) if not _is_target(module, targets)), None)
        if unnamed is not None:
            # PEFT would leave its tensors out without a word.
            raise _invalid(f"{unnamed} is none of the target_modules of adapter_config.json")
    half = next((module for module, matrices in sorted(pairs.items()) if len(matrices) == 1), None)
    if half is not None:
        raise _invalid(f"{half} has only one of lora_A and lora_B")
    return AdapterFacts(rank, scale, tuple(sorted(pairs)))


def _is_target(module: str, targets: Sequence[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _rank_and_scale(config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    # No defaults: an adapter without its own rank and alpha would be scaled by a guess.
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _invalid(f"adapter_config.json has no valid rank: r = {rank!r}")
    if rank > max_rank:
        raise _invalid(f"rank {rank} is above this server's max_lora_rank of {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _invalid(f"adapter_config.json has no valid lora_alpha: {alpha!r}")
    return rank, float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _invalid(text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_WEIGHTS, text)
