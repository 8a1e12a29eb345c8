"""A Qwen3 of 0.4 billion random weights, for machines that have a GPU and no model."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from opentinker_kit.testing.models import build_tiny_qwen3

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY = 1024, 24, 16, 8, 128, 3072, 32_768


def build(directory: Path) -> Path:
    """Write it in bfloat16, with the byte tokenizer of the tiny model; returns `directory`."""
    build_tiny_qwen3(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator)
        return values.div_(columns**0.5).to(torch.bfloat16)

    def ones(count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD),
            f"{prefix}.self_attn.q_norm.weight": ones(HEAD),
            f"{prefix}.self_attn.k_norm.weight": ones(HEAD),
            f"{prefix}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
