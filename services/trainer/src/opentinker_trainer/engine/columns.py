"""The per-token arrays of a request, end to end, so that a pass gathers what it needs by position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker_trainer.domain.plan import Layout
from opentinker_trainer.domain.samples import ARRAYS, Sample

Array = NDArray[np.float32]
Indices = NDArray[np.int64]

_MISSING = {"weights": 1.0, "proximal_logprobs": np.nan}
"""What stands for the array of a sample that has none, where others have one. Default 0."""


@dataclass(frozen=True, slots=True)
class Supports:
    """The sets that T tokens were chosen among, M ids in all."""

    starts: Indices
    """[T + 1]: where the ids of each token begin, and the end. A token without ids has the vocabulary."""
    ids: Indices
    """[M]"""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Supports | None":
        """None where every token has the vocabulary."""
        if all(sample.support is None for sample in samples):
            return None
        sizes = np.concatenate(
            [
                np.zeros(sample.length, np.int64)
                if sample.support is None
                else np.maximum(sample.support.sizes, 0)
                for sample in samples
            ]
        )
        ids = [sample.support.ids for sample in samples if sample.support is not None]
        return cls(np.concatenate([[0], np.cumsum(sizes)]), np.concatenate(ids).astype(np.int64))

    def at(self, positions: Indices) -> "Supports":
        """Those of some tokens, in their order."""
        sizes = self.starts[positions + 1] - self.starts[positions]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        taken = np.repeat(self.starts[positions] - starts[:-1], sizes) + np.arange(starts[-1])
        return Supports(starts, self.ids[taken])


@dataclass(frozen=True, slots=True)
class Columns:
    """The per-token arrays of all samples end to end, T tokens in all."""

    starts: NDArray[np.int64]
    """[S + 1]: where each sample begins, and the end."""
    token_ids: NDArray[np.int64]
    temperatures: NDArray[np.float64]
    """[S]"""
    arrays: dict[str, Array]
    """By name, those of `samples.ARRAYS` that at least one sample has."""
    supports: Supports | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Columns":
        arrays: dict[str, Array] = {}
        for name in ARRAYS:
            found = [getattr(sample, name) for sample in samples]
            if all(array is None for array in found):
                continue
            missing = _MISSING.get(name, 0.0)
            arrays[name] = np.concatenate(
                [
                    np.full(sample.length, missing, np.float32) if array is None else array
                    for sample, array in zip(samples, found, strict=True)
                ]
            )
        return cls(
            np.concatenate([[0], np.cumsum([sample.length for sample in samples])]),
            np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
            np.array([sample.temperature for sample in samples]),
            arrays,
            Supports.of(samples),
        )

    def positions(self, cut: Layout) -> NDArray[np.int64]:
        """[N]: where the loss tokens of a layout are."""
        return self.starts[cut.samples] + cut.tokens

    def split(self, column: Array) -> list[Array]:
        """A column of T, by sample."""
        return np.split(column, self.starts[1:-1])
