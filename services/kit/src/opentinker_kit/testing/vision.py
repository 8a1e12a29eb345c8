"""A tiny vision-language model with random weights: the architecture and files of Qwen2.5-VL, no download."""

import io
from pathlib import Path

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from safetensors.numpy import save_file

from opentinker_kit.testing.models import CONTEXT_LENGTH, SPECIAL_TOKENS, byte_tokenizer, write_json

Weights = NDArray[np.float32]

TINY_QWEN2_5_VL = "tiny-qwen2.5-vl-random"
IMAGE_TOKEN = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, "<|video_pad|>")
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 64

_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 64, 2, 4, 2, 16, 128
_TOWER, _TOWER_MLP, _TOWER_LAYERS, _TOWER_HEADS = 32, 64, 2, 2
_PATCH, _FRAMES, _MERGE = 14, 2, 2

# Content is a text, or a list of parts of which images say only that they are there.
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tiny_qwen2_5_vl(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL model of 0.2 M parameters (float32) with a byte-level ChatML tokenizer.

    Names and files are those of the published models; images take 4 to 64 positions. Returns `directory`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer((*SPECIAL_TOKENS, *VISION_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, *VISION_TOKENS)}
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
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "patch_size": _PATCH,
            "temporal_patch_size": _FRAMES,
            "merge_size": _MERGE,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    )
    write_json(
        directory / "config.json",
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "vocab_size": vocabulary,
            "hidden_size": _HIDDEN,
            "intermediate_size": _MLP,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "use_sliding_window": False,
            "sliding_window": CONTEXT_LENGTH,
            "max_window_layers": _LAYERS,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "image_token_id": ids[IMAGE_TOKEN],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "dtype": "float32",
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": _TOWER_LAYERS,
                "hidden_size": _TOWER,
                "hidden_act": "silu",
                "intermediate_size": _TOWER_MLP,
                "num_heads": _TOWER_HEADS,
                "in_channels": 3,
                "out_hidden_size": _HIDDEN,
                "patch_size": _PATCH,
                "spatial_merge_size": _MERGE,
                "temporal_patch_size": _FRAMES,
                "tokens_per_second": 2,
                "window_size": 4 * _PATCH,
                "fullatt_block_indexes": [1],
            },
        },
    )
    write_json(
        directory / "generation_config.json",
        {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    save_file(_weights(vocabulary, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def png(colour: tuple[int, int, int], width: int = 56, height: int = 56) -> bytes:
    """A square of one colour on grey, as a PNG."""
    image = PIL.Image.new("RGB", (width, height), (128, 128, 128))
    inner = (width // 4, height // 4, 3 * width // 4, 3 * height // 4)
    image.paste(PIL.Image.new("RGB", (inner[2] - inner[0], inner[3] - inner[1]), colour), inner)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _weights(vocabulary: int, seed: int) -> dict[str, Weights]:
    """Weights by name; scaled so that logits differ by about 1, and by an image's colour."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Weights:
        return np.asarray(generator.standard_normal((rows, columns)) / np.sqrt(columns), np.float32)

    def bias(size: int) -> Weights:
        return np.asarray(generator.standard_normal(size) / 10, np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, _HIDDEN)}
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            weights[f"{prefix}.self_attn.{name}.weight"] = matrix(rows, _HIDDEN)
            weights[f"{prefix}.self_attn.{name}.bias"] = bias(rows)
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, queries),
            f"{prefix}.mlp.gate_proj.weight": matrix(_MLP, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(_MLP, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN, _MLP),
        }
    weights["model.norm.weight"] = np.ones(_HIDDEN, np.float32)
    patch = 3 * _FRAMES * _PATCH * _PATCH
    weights["visual.patch_embed.proj.weight"] = matrix(_TOWER, patch).reshape(
        _TOWER, 3, _FRAMES, _PATCH, _PATCH
    )
    for layer in range(_TOWER_LAYERS):
        prefix = f"visual.blocks.{layer}"
        weights |= {
            f"{prefix}.norm1.weight": np.ones(_TOWER, np.float32),
            f"{prefix}.norm2.weight": np.ones(_TOWER, np.float32),
        }
        for name, rows, columns in (
            ("attn.qkv", 3 * _TOWER, _TOWER),
            ("attn.proj", _TOWER, _TOWER),
            ("mlp.gate_proj", _TOWER_MLP, _TOWER),
            ("mlp.up_proj", _TOWER_MLP, _TOWER),
            ("mlp.down_proj", _TOWER, _TOWER_MLP),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
            weights[f"{prefix}.{name}.bias"] = bias(rows)
    merged = _TOWER * _MERGE * _MERGE
    weights["visual.merger.ln_q.weight"] = np.ones(_TOWER, np.float32)
    for name, rows in (("0", merged), ("2", _HIDDEN)):
        weights[f"visual.merger.mlp.{name}.weight"] = matrix(rows, merged)
        weights[f"visual.merger.mlp.{name}.bias"] = bias(rows)
    return weights
