"""In which order rows are learned from, and which of them make a step: pure functions of seed and position.

The epochs stand one behind the other, each in an order of its own, and a step takes the next rows of that
endless line. So a position in it, one number, is all that a run needs to go on where it was, and no row is
left out where an epoch ends within a batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from opentinker.errors import invalid
from opentinker.sampling import identity


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much a step learns from: a number of rows, or as many rows as fit into a number of tokens."""

    rows: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.rows is None) == (self.tokens is None):
            raise invalid("batch_size", "give batch_size (rows) or batch_tokens, one of the two")
        for name, value in (("batch_size", self.rows), ("batch_tokens", self.tokens)):
            if value is not None and value < 1:
                raise invalid(name, f"must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of a step, by index, and where the line of rows goes on behind it."""

    indices: tuple[int, ...]
    next_ordinal: int


class Batches:
    """Batches of rows with the given lengths. With `epochs` the line ends, without it goes on for ever."""

    def __init__(
        self,
        lengths: Sequence[int],
        size: BatchSize,
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if size.tokens is not None and max(lengths) > size.tokens:
            raise invalid(
                "batch_tokens", f"{size.tokens} tokens do not hold the longest row, which has {max(lengths)}"
            )
        self._lengths = lengths
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(lengths)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def index(self, ordinal: int) -> int:
        """The row at a place in the line."""
        epoch, place = divmod(ordinal, len(self._lengths))
        return self._order(epoch)[place]

    def epoch(self, ordinal: int) -> float:
        """How many times the data has been gone through when the line is at a place."""
        return ordinal / len(self._lengths)

    def at(self, ordinal: int) -> Batch | None:
        """The batch that begins at a place; None behind the end."""
        end = self._end
        if self._size.rows is not None:
            stop = ordinal + self._size.rows if end is None else min(ordinal + self._size.rows, end)
        else:
            assert self._size.tokens is not None
            stop, room = ordinal, self._size.tokens
            while (end is None or stop < end) and self._lengths[self.index(stop)] <= room:
                room -= self._lengths[self.index(stop)]
                stop += 1
        if stop <= ordinal:
            return None
        return Batch(tuple(self.index(each) for each in range(ordinal, stop)), stop)

    def follow(self, ordinal: int = 0) -> Iterator[Batch]:
        """Batch after batch from a place on."""
        while (batch := self.at(ordinal)) is not None:
            yield batch
            ordinal = batch.next_ordinal

    def count(self) -> int:
        """How many there are. Only with `epochs`."""
        assert self._end is not None
        if self._size.rows is not None:
            return -(-self._end // self._size.rows)
        return sum(1 for _ in self.follow())

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        count = len(self._lengths)
        if not self._shuffle:
            return range(count)
        # Sorted by hashes: the same in every version of every library, unlike a generator's permutation.
        keys = [identity.digest("sft-order", self._seed, epoch, index) for index in range(count)]
        return sorted(range(count), key=keys.__getitem__)
