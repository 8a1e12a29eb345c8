"""The model call of a pass: from a layout to the scores of its loss tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.plan import PADDING, Layout
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Columns
from opentinker_trainer.engine.logprobs import Kept, TokenScores, token_scores
from opentinker_trainer.engine.model_view import ModelView
from opentinker_trainer.engine.numerics import DTYPES, accumulator
from opentinker_trainer.engine.packing import PackedRow, unseen_mask


class Scorer:
    """Runs the model of a policy that is active."""

    def __init__(self, base: BaseModel, logit_rows: int) -> None:
        self._base = base
        self._logit_rows = logit_rows

    def score(
        self, view: ModelView, cut: Layout, columns: Columns, *, entropy_gradient: bool = False
    ) -> TokenScores:
        """Scores of the layout's loss tokens; values where the policy has a value head."""
        return view.run(lambda: self._score(view, cut, columns, entropy_gradient))

    def _score(self, view: ModelView, cut: Layout, columns: Columns, entropy_gradient: bool) -> TokenScores:
        decoder = view.decoder
        with self._images(cut, decoder) as inputs:
            hidden = decoder(**inputs, use_cache=False).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[self._tensor(cut.sources)]
        output = view.output
        positions = columns.positions(cut)
        supports = None if columns.supports is None else columns.supports.at(positions)
        scores = token_scores(
            rows,
            output.weight.to(rows.dtype),
            None if output.bias is None else output.bias.to(rows.dtype),
            self._tensor(columns.token_ids[positions]),
            self._tensor(columns.temperatures[cut.samples]).to(accumulator(rows.dtype)),
            chunk=self._logit_rows,
            entropy=True,
            entropy_gradient=entropy_gradient,
            low_rank=None if output.adapter is None else output.adapter.of(rows),
            kept=None if supports is None else Kept(supports.starts, self._tensor(supports.ids)),
        )
        if view.value_head is not None:
            scores = scores._replace(values=view.value_head.of(rows))
        return scores

    @contextmanager
    def _images(self, cut: Layout, decoder: Any) -> Iterator[dict[str, Any]]:
        """What the decoder is called with; within, it sees the layout's images."""
        ids = self._tensor(cut.token_ids)
        if not cut.images:
            yield {"input_ids": ids, **_attention(cut, DTYPES[self._base.forward_dtype], self._base.device)}
            return
        assert self._base.vision is not None, "images are refused where there is no vision tower"
        with self._base.vision.placed(cut, decoder) as positions:
            positions = positions.to(ids.device)
            yield {"input_ids": ids, "position_ids": positions, "attention_mask": None}

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        """An array on the model's device."""
        return torch.from_numpy(array).to(self._base.device)


def _attention(cut: Layout, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What tells the model which columns see which; nothing where rows are causal and padded."""
    segments = torch.from_numpy(cut.segments)
    positions = torch.from_numpy(cut.position_ids).to(device)
    if cut.packed_lengths:
        rows = [
            PackedRow(part.shape[1], _mask(part, dtype).to(device) if bool(part.any()) else None)
            for part in segments.split(cut.packed_lengths, dim=1)
        ]
        unseen = unseen_mask(segments.shape[1]).to(device)
        return {"position_ids": positions, "attention_mask": unseen, "packed_rows": rows}
    if cut.shared:
        return {"position_ids": positions, "attention_mask": _mask(segments, dtype).to(device)}
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
