"""The rows that the training benchmarks work on, the same for both sides, made from seeds."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PROMPT_SHARE = 0.25
"""Part of a row that is not trained on."""
FIRST_ID, LAST_ID = 100, 49_000


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sequence; arrays have one entry a token."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None = None
    """Of the policy that sampled, where it is trained on."""
    advantage: float = 1.0

    @property
    def loss_tokens(self) -> int:
        return sum(self.loss_mask)


def equal_rows(count: int = 16, length: int = 128, seed: int = 0) -> list[TrainRow]:
    """Rows of one length."""
    return _rows([length] * count, seed)


def ragged_rows(
    count: int = 64, mean: float = 120.0, sigma: float = 1.0, cut: int = 1024, seed: int = 0
) -> list[TrainRow]:
    """Log-normal lengths with this mean, at most `cut`, in arrival order."""
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return _rows([int(length) for length in np.clip(np.rint(lengths), 8, cut)], seed)


def _rows(lengths: Sequence[int], seed: int) -> list[TrainRow]:
    generator = np.random.default_rng(seed + 1)
    rows = []
    for length in lengths:
        prompt = max(1, int(PROMPT_SHARE * length))
        ids = generator.integers(FIRST_ID, LAST_ID, length).tolist()
        rows.append(TrainRow(ids, [0] * prompt + [1] * (length - prompt)))
    return rows


def write_rows(rows: Sequence[TrainRow], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def read_rows(path: Path) -> list[TrainRow]:
    return [TrainRow(**row) for row in json.loads(path.read_text())]
