"""Attention over rows that lie end to end in one row of the batch, none of which sees another.

Each row is a call of scaled dot product attention of its own: a plain causal one without any mask, or one
with the small mask of a row whose samples share a prefix. So nothing is computed for padding, and no mask
of the whole length exists.

A model takes part if it passes unknown keywords on to transformers' attention functions and if every layer
attends to everything before it; whether it does is tried out once, when it is loaded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "opentinker_rows"
"""Under which transformers knows the attention function."""
_TOLERANCE = 1e-4


class PackedRow(NamedTuple):
    """A part of the packed row."""

    length: int
    mask: Tensor | None
    """Additive [1, 1, length, length]; None: causal."""


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_rows: Sequence[PackedRow] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D] and key, value [1, key heads, T, D] give [1, T, heads, D]."""
    if packed_rows is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    lengths = [row.length for row in packed_rows]
    groups = query.shape[1] // key.shape[1]
    # `split` and not slices: its backward pass joins the parts once instead of adding padded ones up.
    parts = zip(
        query.split(lengths, dim=2),
        repeat_kv(key, groups).split(lengths, dim=2),
        repeat_kv(value, groups).split(lengths, dim=2),
        packed_rows,
        strict=True,
    )
    outputs = [
        functional.scaled_dot_product_attention(
            q, k, v, attn_mask=row.mask, is_causal=row.mask is None and row.length > 1, scale=scaling
        ).transpose(1, 2)
        for q, k, v, row in parts
    ]
    return torch.cat(outputs, dim=1), None


def enable(model: Any, decoder: Any) -> bool:
    """Have a model that was loaded with "sdpa" attend by rows where it is asked to; whether it can.

    It is tried out on two short rows. A model that cannot, or has another kind of attention, is left as it
    was.
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in (NAME, "sdpa"):
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    if config._attn_implementation == NAME and _works(decoder):
        return True
    model.set_attn_implementation("sdpa")
    return False


def unseen_mask(length: int) -> Tensor:
    """What a packed call of `length` columns gives for the mask, so that transformers makes none itself.

    It fits no attention of that length: where rows would not be kept apart, the call fails.
    """
    return torch.zeros(1, 1, 1, length + 1)


def _works(decoder: Any) -> bool:
    vocabulary = decoder.get_input_embeddings().weight.shape[0]
    rows = [torch.arange(start, start + length).remainder(vocabulary) for start, length in ((1, 5), (7, 4))]
    device = decoder.get_input_embeddings().weight.device
    ids = torch.cat(rows)[None].to(device)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None].to(device)
    dtype = decoder.get_input_embeddings().weight.dtype
    with torch.no_grad():
        try:
            packed = decoder(
                input_ids=ids,
                position_ids=positions,
                attention_mask=unseen_mask(ids.shape[1]),
                use_cache=False,
                packed_rows=tuple(PackedRow(len(row), None) for row in rows),
            ).last_hidden_state[0]
        except (TypeError, ValueError, RuntimeError):
            return False
        alone = [decoder(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows]
    expected = torch.cat(alone).float()
    scale = max(1.0, float(expected.abs().max()))
    tolerance = _TOLERANCE if dtype != torch.bfloat16 else 0.05
    return float((packed.float() - expected).abs().max()) <= tolerance * scale
