"""What the configuration beside a weight file may say: adapter_config.json of PEFT, config.json of a model.

Weights that load but mean something else are the worst kind, so every option that changes what they mean has
a value that is honoured, or the weights are refused.
"""

from collections.abc import Mapping
from typing import Any

# Options of adapter_config.json that change what the weights mean, and the values that are honoured.
_ADAPTER: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "use_rslora": (False, True, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "megatron_config": (None, {}),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}
# Options of config.json that decide what the same tensors compute.
_MODEL = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)


def unhonoured_option(config: Mapping[str, Any]) -> str | None:
    """The first option of an adapter's configuration that would be ignored, as "name = value"."""
    for option, honoured in _ADAPTER.items():
        if option in config and config[option] not in honoured:
            return f"{option} = {config[option]!r}"
    return None


def config_mismatch(config: Mapping[str, Any], base: Mapping[str, Any]) -> str | None:
    """The first option in which a model's configuration differs from the base model's, in words."""
    for option in _MODEL:
        if option in config and option in base and config[option] != base[option]:
            return f"config.json sets {option} = {config[option]!r}, the base model has {base[option]!r}"
    return None
