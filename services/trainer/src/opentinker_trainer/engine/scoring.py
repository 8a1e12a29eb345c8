"""The model call of a pass: from a layout to the scores of its loss tokens."""

import torch
from torch import Tensor

from opentinker_trainer.domain.plan import PADDING, Layout
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Columns
from opentinker_trainer.engine.logprobs import TokenScores, token_scores
from opentinker_trainer.engine.numerics import accumulator


class Scorer:
    """Runs the model as it is (whatever adapter is active in it)."""

    def __init__(self, base: BaseModel, logit_rows: int) -> None:
        self._base = base
        self._logit_rows = logit_rows

    def score(self, cut: Layout, columns: Columns, *, entropy_gradient: bool = False) -> TokenScores:
        hidden = self._base.decoder(
            input_ids=torch.from_numpy(cut.token_ids),
            position_ids=torch.from_numpy(cut.position_ids) if cut.shared else None,
            attention_mask=self._mask(cut) if cut.shared else None,
            use_cache=False,
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

    def _mask(self, cut: Layout) -> Tensor:
        """Additive attention mask [B, 1, L, L]. A padded column sees itself, or its softmax were 0 / 0."""
        segments = torch.from_numpy(cut.segments)
        query, key = segments[:, :, None], segments[:, None, :]
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & (key != PADDING) & ((key == 0) | (key == query))
        allowed |= torch.eye(length, dtype=torch.bool)
        dtype = self._base.output[0].dtype
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
        return mask[:, None]
