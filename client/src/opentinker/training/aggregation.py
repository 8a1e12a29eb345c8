"""How per-token losses become one number: a weight for each token and one denominator for the whole batch.

loss = sum over rows i and tokens t of weight_i loss_it / denominator. The trainer sums and divides once by
the number given here, so no split over micro-batches, ranks, chunks or calls can change it.

| mode | weight of a token | denominator |
|---|---|---|
| `token_mean` | 1 | loss tokens |
| `token_sum` | 1 | 1 |
| `seq_mean_token_sum` | 1 | sequences |
| `seq_mean_token_sum_norm` | 1 | sequences * norm (Dr. GRPO: norm = longest completion allowed) |
| `seq_mean_token_mean` | 1 / loss tokens of its sequence | sequences |

A sequence is a row with at least one loss token. The names are verl's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from opentinker.errors import invalid
from opentinker.training.rows import Floats, Mask, Row, paired

Mode = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm", "seq_mean_token_mean"
]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`weights` [rows]: the factor of each of a row's tokens, None where all are 1."""

    denominator: float
    weights: Floats | None = None

    def total(self, losses: Sequence[Row], masks: Sequence[Mask]) -> float:
        """The loss of the batch from per-token losses: what the trainer's sums come to."""
        sums = np.array([values[kept].sum() for values, kept in paired(losses, masks, "losses")])
        return float((sums if self.weights is None else sums * self.weights).sum()) / self.denominator


def aggregate(mode: Mode, masks: Sequence[Mask], norm: float | None = None) -> Aggregation:
    """Weights and denominator of a whole batch, from the loss masks of all its rows.

    `norm` belongs to `seq_mean_token_sum_norm`, which needs it. A batch without any loss token has the
    denominator 1: its sum is 0, and so is its loss. InvalidArgument on anything else.
    """
    if mode not in get_args(Mode):
        raise invalid("aggregation", f"must be one of {', '.join(get_args(Mode))}, not {mode!r}")
    if (norm is not None) != (mode == "seq_mean_token_sum_norm"):
        raise invalid("norm", "is what seq_mean_token_sum_norm needs, and nothing else takes")
    if norm is not None and not (np.isfinite(norm) and norm > 0):
        raise invalid("norm", f"must be a positive finite number, not {norm}")
    counts = np.array([np.count_nonzero(np.asarray(mask)) for mask in masks], dtype=np.float64)
    sequences = float(np.count_nonzero(counts))
    if mode == "token_sum" or sequences == 0:
        return Aggregation(1.0)
    if mode == "token_mean":
        return Aggregation(float(counts.sum()))
    if mode == "seq_mean_token_mean":
        return Aggregation(sequences, np.where(counts > 0, 1.0 / np.maximum(counts, 1.0), 0.0))
    return Aggregation(sequences * (norm if norm is not None else 1.0))
