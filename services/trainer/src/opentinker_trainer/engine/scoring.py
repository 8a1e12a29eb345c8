"""The model call of a pass: from a layout to the scores of its loss tokens."""

from typing import Any

import torch
from torch import Tensor

from opentinker_trainer.domain.plan import PADDING, Layout
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Columns
from opentinker_trainer.engine.logprobs import TokenScores, token_scores
from opentinker_trainer.engine.numerics import accumulator
from opentinker_trainer.engine.packing import PackedRow, unseen_mask


class Scorer:
    """Runs the model as it is (whatever adapter is active in it)."""

    def __init__(self, base: BaseModel, logit_rows: int) -> None:
        self._base = base
        self._logit_rows = logit_rows

    def score(self, cut: Layout, columns: Columns, *, entropy_gradient: bool = False) -> TokenScores:
        hidden = self._base.decoder(
            input_ids=torch.from_numpy(cut.token_ids), use_cache=False, **self._attention(cut)
        ).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(cut.sources)]
        weight, bias = self._base.output
        return token_scores(
            rows,
            weight,
            bias,
            torch.from_numpy(columns.token_ids[columns.positions(cut)]),
            torch.from_numpy(columns.temperatures[cut.samples]).to(accumulator(weight.dtype)),
            chunk=self._logit_rows,
            entropy=True,
            entropy_gradient=entropy_gradient,
        )

    def _attention(self, cut: Layout) -> dict[str, Any]:
        """What tells the model which columns see which; nothing where rows are causal and padded."""
        dtype = self._base.output[0].dtype
        segments, positions = torch.from_numpy(cut.segments), torch.from_numpy(cut.position_ids)
        if cut.packed_lengths:
            rows = [
                PackedRow(part.shape[1], _mask(part, dtype) if bool(part.any()) else None)
                for part in segments.split(cut.packed_lengths, dim=1)
            ]
            unseen = unseen_mask(segments.shape[1])
            return {"position_ids": positions, "attention_mask": unseen, "packed_rows": rows}
        if cut.shared:
            return {"position_ids": positions, "attention_mask": _mask(segments, dtype)}
        return {}


def _mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive attention mask [B, 1, L, L] of segments [B, L].

    A padded column sees itself, or its softmax were 0 / 0.
    """
    query, key = segments[:, :, None], segments[:, None, :]
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    allowed = causal & (key != PADDING) & ((key == 0) | (key == query))
    allowed |= torch.eye(length, dtype=torch.bool)
    mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
    return mask[:, None]
