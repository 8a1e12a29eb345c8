"""Whether the files of a fully trained policy are weights of the base model: checked before any engine sees
them. A server keeps the base model's configuration; a version brings values for its tensors and nothing else.
"""

from collections.abc import Mapping
from typing import Any

from opentinker_inference.domain.adapter_layout import Shapes
from opentinker_kit.errors import ServiceError
from opentinker_kit.weight_configs import config_mismatch
from opentinkerapi.runtime.reasons import Reason

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_COMPUTED = "rotary_emb.inv_freq"
"""Ends the names of what old checkpoints hold and models compute."""


def check_model(
    config: Mapping[str, Any], tensors: Shapes, base_config: Mapping[str, Any], base_tensors: Shapes
) -> None:
    """INVALID_WEIGHTS, naming the option or tensor, unless the files fit the base model one to one."""
    mismatch = config_mismatch(config, base_config)
    if mismatch is not None:
        raise _invalid(mismatch)
    tied = is_tied(base_config, base_tensors)
    expected, given = _named(base_tensors, tied), _named(tensors, tied)
    for name in sorted(expected.keys() | given.keys()):
        if name not in given:
            raise _invalid(f"tensor {name} is missing")
        if name not in expected:
            raise _invalid(f"tensor {name} is none of the base model's")
        if given[name] != expected[name]:
            raise _invalid(
                f"tensor {name} has shape {list(given[name])}, the base model's has {list(expected[name])}"
            )


def is_tied(config: Mapping[str, Any], tensors: Shapes) -> bool:
    """Whether the output layer's weight is the embedding's."""
    return bool(config.get("tie_word_embeddings", OUTPUT not in tensors))


def output_shape(config: Mapping[str, Any], tensors: Shapes) -> tuple[int, int] | None:
    """(out, in) of the output layer, if the checkpoint tells."""
    shape = tensors.get(OUTPUT) or (tensors.get(EMBEDDING) if is_tied(config, tensors) else None)
    return None if shape is None else (shape[0], shape[1])


def _named(tensors: Shapes, tied: bool) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(shape)
        for name, shape in tensors.items()
        if not name.endswith(_COMPUTED) and not (tied and name == OUTPUT)
    }


def _invalid(text: str) -> ServiceError:
    return ServiceError(Reason.INVALID_WEIGHTS, text)
