"""Key-value memory of the deterministic engine.

A row's cache is a buffer of a fixed number of positions, its capacity, taken from a short list of sizes. What
lies beyond the row's length is finite and masked: it meets attention weights of exactly zero. So what a row
computes depends on its capacity and on nothing else in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

CHUNK = 512
"""Most positions of a prompt computed at once."""
FIRST_ROWS = 4
"""Rows that a slab has room for at first."""


def capacity_for(positions: int) -> int:
    """Smallest capacity that holds `positions`: 64, 96, 128, 192, 256, 384, 512, 768 ..."""
    size = 64
    while size < positions:
        half = size + size // 2
        if half >= positions:
            return half
        size *= 2
    return size


def padded_length(tokens: int) -> int:
    """Length to which the last chunk of a prompt (1 to CHUNK tokens) is padded."""
    size = 16
    while size < tokens:
        size *= 2
    return size


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one position needs: layers, key-value heads, head size, dtype."""

    layers: int
    heads: int
    head_size: int
    dtype: torch.dtype

    def row_bytes(self, capacity: int) -> int:
        """Memory of one row."""
        return self.layers * 2 * self.heads * capacity * self.head_size * self.dtype.itemsize

    def buffer(self, rows: int, capacity: int) -> torch.Tensor:
        """Zeroed [layers, 2, rows, heads, capacity, head_size]; 2 is keys and values."""
        size = (self.layers, 2, rows, self.heads, capacity, self.head_size)
        return torch.zeros(size, dtype=self.dtype)


class KvView:
    """The cache of one forward pass, in the shape that transformers' models call.

    `buffer` is [layers, 2, rows, heads, capacity, head_size]; the new states of row r go to the positions
    `positions[r]` [tokens], and attention sees the whole capacity (the mask says what counts).
    """

    is_compileable = False

    def __init__(self, buffer: torch.Tensor, positions: torch.Tensor) -> None:
        self._buffer = buffer
        self._positions = positions
        self._rows = torch.arange(buffer.shape[2])[:, None].expand_as(positions)
        self.capacity = int(buffer.shape[4])

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [rows, heads, tokens, head_size]; returns those of all positions."""
        layer = self._buffer[layer_idx]
        layer[0][self._rows, :, self._positions] = keys.transpose(1, 2)
        layer[1][self._rows, :, self._positions] = values.transpose(1, 2)
        return layer[0], layer[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked for by some models; positions are always given explicitly, so nothing depends on it."""
        return 0


def visible(positions: torch.Tensor, capacity: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, 1, tokens, capacity] by which position p sees 0..p."""
    reach = torch.arange(capacity)[None, None, None, :] <= positions[:, None, :, None]
    return torch.zeros(reach.shape, dtype=dtype).masked_fill(~reach, torch.finfo(dtype).min)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Eager attention without copying keys and values for grouped heads.

    query [rows, q_heads, tokens, head_size]; key and value [rows, heads, capacity, head_size].
    """
    rows, q_heads, tokens, size = query.shape
    heads = key.shape[1]
    grouped = query.reshape(rows, heads, (q_heads // heads) * tokens, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)) * scaling
    scores = scores.view(rows, heads, q_heads // heads, tokens, -1) + attention_mask[:, :, None]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(rows, heads, -1, weights.shape[-1]), value)
    return mixed.view(rows, q_heads, tokens, size).transpose(1, 2).contiguous(), None


class Slab:
    """Rows of equal weights and equal capacity that decode together. Rows keep no holes: the last one moves
    into a place that becomes free.
    """

    def __init__(self, shape: KvShape, capacity: int) -> None:
        self.capacity = capacity
        self._shape = shape
        self._buffer = shape.buffer(FIRST_ROWS, capacity)
        self.rows = 0

    def add(self, cache: torch.Tensor) -> int:
        """Copy one row's cache [layers, 2, heads, positions, head_size] in; returns its place."""
        self._hold(self.rows + 1)
        place = self.rows
        self._buffer[:, :, place, :, : cache.shape[3]] = cache
        self._buffer[:, :, place, :, cache.shape[3] :] = 0
        self.rows += 1
        return place

    def read(self, place: int) -> torch.Tensor:
        """The cache of the row at `place`, a view."""
        return self._buffer[:, :, place]

    def remove(self, place: int) -> int:
        """Free `place`; returns the place that the row now in it had before."""
        last = self.rows - 1
        if place != last:
            self._buffer[:, :, place] = self._buffer[:, :, last]
        self.rows = last
        return last

    def view(self, positions: Sequence[int], rows: int) -> KvView:
        """The cache of a step in which row r writes `positions[r]`; `rows` counts filler rows too."""
        self._hold(rows)
        return KvView(self._buffer[:, :, :rows], torch.tensor(positions, dtype=torch.long)[:, None])

    def _hold(self, rows: int) -> None:
        held = int(self._buffer.shape[2])
        if rows > held:
            larger = self._shape.buffer(max(rows, 2 * held), self.capacity)
            larger[:, :, :held] = self._buffer
            self._buffer = larger
