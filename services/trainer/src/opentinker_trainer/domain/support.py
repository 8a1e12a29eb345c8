"""The sets of token ids that a sampler chose among, and what makes them acceptable.

A sampler with top-p, top-k or min-p draws from the distribution over what these keep. The logprob of a token
is then one over that set, for whoever is asked: a ratio of logprobs over different sets is off by the mass
that one of them left out, though nothing was learned.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

MAX_SUPPORT = 256
"""Most ids of one token."""
UNLISTED = -1
"""Size of a set that was too large to be listed."""


@dataclass(frozen=True, slots=True)
class Support:
    """The sets of one row of L tokens."""

    sizes: Ints
    """[L]: ids of each token; 0: all of the vocabulary."""
    ids: Ints
    """The sets end to end, in the order of tokens."""

    def owners(self) -> NDArray[np.int64]:
        """Which token each id belongs to."""
        return np.repeat(np.arange(len(self.sizes)), np.maximum(self.sizes, 0))

    def problem(
        self, token_ids: Ints, loss_mask: NDArray[np.bool_], vocab_size: int
    ) -> tuple[str, str] | None:
        """What is wrong, as (field, text). Sets of tokens that nobody trains on are only counted."""
        sizes, ids = self.sizes, self.ids
        if len(sizes) != len(token_ids):
            return "support_sizes", f"support_sizes has {len(sizes)} entries for {len(token_ids)} tokens"
        wrong = np.flatnonzero((sizes < UNLISTED) | (sizes > MAX_SUPPORT))
        if wrong.size:
            at = int(wrong[0])
            return "support_sizes", f"support_sizes[{at}] is {sizes[at]}; at most {MAX_SUPPORT} ids are taken"
        unlisted = np.flatnonzero(loss_mask & (sizes == UNLISTED))
        if unlisted.size:
            at = int(unlisted[0])
            text = (
                f"token {at} was chosen among more than {MAX_SUPPORT} ids, which the sampler did not list; "
                f"sample with top_k of at most {MAX_SUPPORT}, or leave the token out of loss_mask"
            )
            return "support_sizes", text
        owners = self.owners()
        if len(owners) != len(ids):
            text = f"support_token_ids has {len(ids)} ids where support_sizes adds up to {len(owners)}"
            return "support_token_ids", text
        read = loss_mask[owners]
        owners, ids = owners[read], ids[read]
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            at = int(outside[0])
            text = (
                f"token {owners[at]} has id {ids[at]} in its support, outside the vocabulary of {vocab_size}"
            )
            return "support_token_ids", text
        if len(np.unique(owners * vocab_size + ids)) != len(ids):
            return "support_token_ids", "an id is twice in the support of one token"
        itself = np.bincount(owners[ids == token_ids[owners]], minlength=len(token_ids))
        absent = np.flatnonzero(loss_mask & (sizes > 0) & (itself == 0))
        if absent.size:
            at = int(absent[0])
            text = f"token {at} is id {token_ids[at]}, which is not in its own support"
            return "support_token_ids", text
        return None
