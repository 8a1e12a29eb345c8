"""A tiny model with random weights: real architecture, real tokenizer, no download, the same bits every
time.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Weights = NDArray[np.float32]

TINY_QWEN3 = "tiny-qwen3-random"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_LENGTH = 2048

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 64, 2, 4, 2, 32, 128

_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tiny_qwen3(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen3 model of 0.1 M parameters (float32) with a byte-level ChatML tokenizer; returns
    `directory`.

    One token a byte, so any text can be encoded; context 2,048.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(SPECIAL_TOKENS)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": CONTEXT_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    )
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": vocabulary,
            "hidden_size": _HIDDEN,
            "intermediate_size": _MLP,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": special["<|im_end|>"],
            "pad_token_id": special["<|endoftext|>"],
            "dtype": "float32",
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "eos_token_id": [special["<|im_end|>"], special["<|endoftext|>"]],
            "pad_token_id": special["<|endoftext|>"],
        },
    )
    save_file(_weights(vocabulary, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def byte_tokenizer(special_tokens: Sequence[str]) -> Tokenizer:
    """One token a byte, and after these the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return tokenizer


def _weights(vocabulary: int, seed: int) -> dict[str, Weights]:
    """Weights by name; scaled so that logits differ by about 1 and a small update shows."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Weights:
        return np.asarray(generator.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    weights = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(queries, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(keys, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(keys, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, queries),
            f"{prefix}.self_attn.q_norm.weight": np.ones(_HEAD_DIM, np.float32),
            f"{prefix}.self_attn.k_norm.weight": np.ones(_HEAD_DIM, np.float32),
            f"{prefix}.mlp.gate_proj.weight": matrix(_MLP, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(_MLP, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN, _MLP),
        }
    weights["model.norm.weight"] = np.ones(_HIDDEN, np.float32)
    return weights


def write_json(path: Path, value: object) -> None:
    """A file with a JSON value, for people to read."""
    path.write_text(json.dumps(value, indent=1) + "\n")
