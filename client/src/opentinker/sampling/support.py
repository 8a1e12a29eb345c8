"""The sets of token ids that sampled tokens were chosen among.

A sampler with top_p, top_k or min_p draws from what these keep, and its logprobs are of that distribution.
The trainer computes its own over the same sets, so that the ratio of the two is 1 where nothing was learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinkerapi.runtime.tensors import unpack_ids

Ints = NDArray[np.int32]

MAX_SUPPORT = 256
"""Most ids that are listed for one token."""
UNLISTED = -1
"""Size of a set that is larger."""


@dataclass(frozen=True, slots=True)
class Support:
    """The sets of n tokens. A row of prompt and completion has
    `Support.joined([(len(prompt), completion.support)], len(row))`.
    """

    sizes: Ints
    """[n]: ids of each token; 0: all of the vocabulary; -1: too many to be listed."""
    ids: Ints
    """The sets end to end, in the order of tokens."""

    @classmethod
    def of_wire(cls, sizes: bytes, ids: bytes) -> "Support | None":
        """From a message's two fields; None where they are empty."""
        if not sizes:
            return None
        return cls(np.array(unpack_ids(sizes), np.int32), np.array(unpack_ids(ids), np.int32))

    @classmethod
    def joined(cls, parts: Sequence["tuple[int, Support]"], count: int) -> "Support | None":
        """Of `count` tokens, from parts with the places where they begin, in order. Tokens between them have
        the whole vocabulary. None where there are no parts.
        """
        if not parts:
            return None
        sizes = np.zeros(count, np.int32)
        for start, part in parts:
            sizes[start : start + len(part.sizes)] = part.sizes
        return cls(sizes, np.concatenate([part.ids for _, part in parts]))

    @property
    def unlisted(self) -> int:
        """How many tokens have a set that is not listed."""
        return int((self.sizes == UNLISTED).sum())

    def __len__(self) -> int:
        return len(self.sizes)

    def sets(self) -> list[tuple[int, ...] | None]:
        """The set of each token; None where it is the vocabulary or not listed."""
        ends = np.cumsum(np.maximum(self.sizes, 0))
        return [
            tuple(self.ids[end - size : end].tolist()) if size > 0 else None
            for size, end in zip(self.sizes.tolist(), ends.tolist(), strict=True)
        ]
