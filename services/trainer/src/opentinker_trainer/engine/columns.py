"""The per-token arrays of a request, end to end, so that a pass gathers what it needs by position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker_trainer.domain.plan import Layout
from opentinker_trainer.domain.samples import Sample

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Columns:
    """The per-token arrays of all samples end to end, T tokens in all; what is left out is 0, weights 1."""

    starts: NDArray[np.int64]
    """[S + 1]: where each sample begins, and the end."""
    token_ids: NDArray[np.int64]
    behavior_logprobs: Array
    advantages: Array
    weights: Array
    temperatures: NDArray[np.float64]
    """[S]"""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Columns":
        def column(name: str, missing: float) -> Array:
            arrays = [getattr(sample, name) for sample in samples]
            filled = [
                np.full(sample.length, missing, np.float32) if array is None else array
                for sample, array in zip(samples, arrays, strict=True)
            ]
            return np.concatenate(filled)

        return cls(
            np.concatenate([[0], np.cumsum([sample.length for sample in samples])]),
            np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
            column("behavior_logprobs", 0.0),
            column("advantages", 0.0),
            column("weights", 1.0),
            np.array([sample.temperature for sample in samples]),
        )

    def positions(self, cut: Layout) -> NDArray[np.int64]:
        """[N]: where the loss tokens of a layout are."""
        return self.starts[cut.samples] + cut.tokens

    def split(self, column: Array) -> list[Array]:
        """A column of T, by sample."""
        return np.split(column, self.starts[1:-1])
