"""How a request is cut into micro-batches: a pure function of the request and the launch settings.

Rows that start with the same untrained tokens (the rollouts of one task) share them: the prefix is laid
out once, followed by each member's continuation, and attention lets a continuation see the prefix and itself
only. That is exact, and for groups of short answers it saves most of the work. With `pack` the rows of a
micro-batch lie end to end in one row of the batch and none sees another: nothing is padded. Without it they
lie below each other, padded to the longest. Free memory, other tenants and arrival times have no say, so
that a replay computes the same bits.

Rule for models: sharing and packing need attention to everything before a token in every layer, and packing
an attention function that takes rows ("sdpa"). Where a model has neither (sliding windows, state spaces),
rows are single samples, padded. A sample with images shares nothing and is not packed: micro-batches with
images are padded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from opentinker_trainer.domain.images import SampleImage
from opentinker_trainer.domain.samples import Sample

PADDING = -1
"""Segment of a padded column."""
_MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Launch settings that decide the cut."""

    token_budget: int = 512
    """Most tokens in a micro-batch, padding included (one row may exceed it alone)."""
    max_rows: int = 0
    """Most rows in a micro-batch; 0: no limit."""
    share_prefix: bool = True
    max_shared_row_tokens: int = 384
    """Longest row that shares a prefix: attention costs the square of it."""
    pack: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One or several samples laid out in one row of the batch."""

    members: tuple[int, ...]
    """Indices of samples."""
    prefix: int
    """How many leading tokens the members share; 0 where there is one member."""
    length: int
    """Tokens of the row without padding."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together."""

    rows: tuple[Row, ...]
    packed: bool
    """The rows lie end to end."""
    images: bool = False
    """The rows have images."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the batch: rows and columns, padding included."""
        lengths = [row.length for row in self.rows]
        return (1, sum(lengths)) if self.packed else (len(lengths), max(lengths))

    @property
    def tokens(self) -> int:
        """Columns that go through the model, padding included."""
        rows, columns = self.shape
        return rows * columns


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a layout: its row, and the column of its first place."""

    row: int
    column: int
    image: SampleImage


@dataclass(frozen=True, slots=True)
class Layout:
    """A micro-batch as arrays. B rows of length L, packed (B = 1) or padded; N loss tokens."""

    token_ids: NDArray[np.int64]
    """[B, L]; 0 where padded."""
    position_ids: NDArray[np.int64]
    """[B, L]"""
    segments: NDArray[np.int64]
    """[B, L]: within a row 0 is seen by all that follows, j > 0 by itself, PADDING by none."""
    packed_lengths: tuple[int, ...]
    """Lengths of the rows that lie end to end; none where rows are padded."""
    sources: NDArray[np.int64]
    """[N]: flat index into [B, L] of the column whose output predicts the token."""
    samples: NDArray[np.int64]
    """[N]: which sample the token belongs to."""
    tokens: NDArray[np.int64]
    """[N]: which token of that sample."""
    images: tuple[PlacedImage, ...] = ()
    """By row and column."""

    @property
    def shared(self) -> bool:
        """Whether some row needs more than a plain causal mask."""
        return bool((self.segments > 0).any())


def plan(
    samples: Sequence[Sample], wanted: Sequence[int], settings: PlanSettings, shares: int = 1
) -> list[MicroBatch]:
    """Cut the samples with indices `wanted` into micro-batches, longest rows first, images last.

    Where `shares` of them run at once there are a multiple of it, about equally large, as far as rows can be
    dealt so.
    """
    with_images = [index for index in wanted if samples[index].images]
    if with_images:
        others = [index for index in wanted if not samples[index].images]
        padded = replace(settings, pack=False)
        pictured = _cut(samples, with_images, padded, shares)
        return [
            *_cut(samples, others, settings, shares),
            *(replace(batch, images=True) for batch in pictured),
        ]
    return _cut(samples, wanted, settings, shares)


def _cut(
    samples: Sequence[Sample], wanted: Sequence[int], settings: PlanSettings, shares: int
) -> list[MicroBatch]:
    rows = sorted(_rows(samples, wanted, settings), key=lambda row: (-row.length, row.members[0]))
    batches = _fill(rows, settings)
    if shares == 1 or not rows:
        return batches
    count = -(-len(batches) // shares) * shares
    # The smallest budget with which there are no more than that; filling is monotone in it.
    low, high = 1, settings.token_budget
    while low < high:
        middle = (low + high) // 2
        if len(_fill(rows, replace(settings, token_budget=middle))) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill(rows, replace(settings, token_budget=high))


def _fill(rows: Sequence[Row], settings: PlanSettings) -> list[MicroBatch]:
    """Micro-batches of rows in their order, each as full as may be."""
    batches: list[MicroBatch] = []
    open_rows: list[Row] = []
    size = 0
    for row in rows:
        # Rows come longest first, so the first one sets what the others are padded to.
        columns = row.length if settings.pack or not open_rows else open_rows[0].length
        full = open_rows and (
            size + columns > settings.token_budget
            or (settings.max_rows and len(open_rows) >= settings.max_rows)
        )
        if full:
            batches.append(MicroBatch(tuple(open_rows), settings.pack))
            open_rows, size, columns = [], 0, row.length
        open_rows.append(row)
        size += columns
    if open_rows:
        batches.append(MicroBatch(tuple(open_rows), settings.pack))
    return batches


class Sized(Protocol):
    """What a slice is made of."""

    @property
    def tokens(self) -> int:
        """Columns that go through the model, padding included."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


def slices(batches: Sequence[SizedT], tokens: int) -> list[tuple[SizedT, ...]]:
    """Runs of micro-batches of about `tokens` tokens, at least one micro-batch each."""
    found: list[tuple[SizedT, ...]] = []
    run: list[SizedT] = []
    size = 0
    for batch in batches:
        if run and size + batch.tokens > tokens:
            found.append(tuple(run))
            run, size = [], 0
        run.append(batch)
        size += batch.tokens
    return [*found, tuple(run)] if run else found


def _rows(samples: Sequence[Sample], wanted: Sequence[int], settings: PlanSettings) -> list[Row]:
    groups: dict[bytes, list[int]] = {}
    for index in wanted:
        groups.setdefault(_shareable(samples[index], settings, index), []).append(index)
    rows: list[Row] = []
    for members in groups.values():
        prefix = _first_loss_token(samples[members[0]])
        open_members: list[int] = []
        length = 0
        for index in members:
            own = samples[index].length - prefix
            if open_members and length + own > settings.max_shared_row_tokens:
                rows.append(_row(open_members, prefix, length))
                open_members = []
            if not open_members:
                length = prefix
            open_members.append(index)
            length += own
        rows.append(_row(open_members, prefix, length))
    return rows


def _row(members: list[int], prefix: int, length: int) -> Row:
    return Row(tuple(members), prefix if len(members) > 1 else 0, length)


def _first_loss_token(sample: Sample) -> int:
    return int(np.argmax(sample.loss_mask)) if sample.loss_mask.any() else sample.length


def _shareable(sample: Sample, settings: PlanSettings, index: int) -> bytes:
    """The key under which samples share a row; unique where sharing is off or not worth it."""
    prefix = _first_loss_token(sample)
    worth = prefix >= _MIN_SHARED_TOKENS and 4 * prefix >= sample.length - prefix
    if not settings.share_prefix or not worth or prefix == sample.length or sample.images:
        return b"#%d" % index
    return b"=" + sample.token_ids[:prefix].tobytes()


def layout(batch: MicroBatch, samples: Sequence[Sample]) -> Layout:
    """Lay a micro-batch out; loss tokens come in the order of rows, members and tokens."""
    shape = batch.shape
    token_ids = np.zeros(shape, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segments = np.full(shape, PADDING, np.int64)
    sources: list[NDArray[np.int64]] = []
    owners: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    images: list[PlacedImage] = []
    begin = 0
    for number, row in enumerate(batch.rows):
        at, first = (0, begin) if batch.packed else (number, 0)
        begin += row.length
        if row.prefix:
            columns = slice(first, first + row.prefix)
            token_ids[at, columns] = samples[row.members[0]].token_ids[: row.prefix]
            position_ids[at, columns] = np.arange(row.prefix)
            segments[at, columns] = 0
        start = first + row.prefix
        for member, index in enumerate(row.members):
            sample = samples[index]
            own = sample.length - row.prefix
            columns = slice(start, start + own)
            token_ids[at, columns] = sample.token_ids[row.prefix :]
            position_ids[at, columns] = np.arange(row.prefix, sample.length)
            segments[at, columns] = member + 1 if row.prefix else 0
            # Column of each of the sample's tokens; the one before a token predicts it.
            where = np.concatenate([np.arange(first, first + row.prefix), np.arange(start, start + own)])
            wanted = np.flatnonzero(sample.loss_mask)
            sources.append(at * shape[1] + where[wanted - 1])
            owners.append(np.full(wanted.shape, index))
            tokens.append(wanted)
            images += [PlacedImage(at, start + image.start, image) for image in sample.images]
            start += own
    return Layout(
        token_ids,
        position_ids,
        segments,
        tuple(row.length for row in batch.rows) if batch.packed else (),
        np.concatenate(sources).astype(np.int64),
        np.concatenate(owners).astype(np.int64),
        np.concatenate(tokens).astype(np.int64),
        tuple(images),
    )
