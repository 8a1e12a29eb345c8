"""How a request is cut into micro-batches: a pure function of the request and the launch settings.

Rows that start with the same untrained tokens (the rollouts of one task) share them: the prefix is laid
out once, followed by each member's continuation, and attention lets a continuation see the prefix and itself
only. That is exact, and for groups of short answers it saves most of the work. Free memory, other tenants and
arrival times have no say, so that a replay computes the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker_trainer.domain.samples import Sample

PADDING = -1
"""Segment of a padded column."""
_MIN_SHARED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Launch settings that decide the cut."""

    token_budget: int = 512
    """Most padded tokens in a micro-batch (one row may exceed it alone)."""
    max_rows: int = 0
    """Most rows in a micro-batch; 0: no limit."""
    share_prefix: bool = True
    max_shared_row_tokens: int = 384
    """Longest row that shares a prefix: attention costs the square of it."""


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

    @property
    def length(self) -> int:
        """Padded length."""
        return max(row.length for row in self.rows)

    @property
    def tokens(self) -> int:
        """Columns that go through the model, padding included."""
        return len(self.rows) * self.length


@dataclass(frozen=True, slots=True)
class Layout:
    """A micro-batch as arrays. B rows of padded length L; N loss tokens."""

    token_ids: NDArray[np.int64]
    """[B, L]; 0 where padded."""
    position_ids: NDArray[np.int64]
    """[B, L]"""
    segments: NDArray[np.int64]
    """[B, L]: 0 is seen by all that follows, j > 0 by itself, PADDING by none."""
    sources: NDArray[np.int64]
    """[N]: flat index into [B, L] of the column whose output predicts the token."""
    samples: NDArray[np.int64]
    """[N]: which sample the token belongs to."""
    tokens: NDArray[np.int64]
    """[N]: which token of that sample."""

    @property
    def shared(self) -> bool:
        """Whether some row needs more than a plain causal mask."""
        return bool((self.segments > 0).any())


def plan(samples: Sequence[Sample], wanted: Sequence[int], settings: PlanSettings) -> list[MicroBatch]:
    """Cut the samples with indices `wanted` into micro-batches, longest rows first."""
    rows = sorted(_rows(samples, wanted, settings), key=lambda row: (-row.length, row.members[0]))
    batches: list[MicroBatch] = []
    open_rows: list[Row] = []
    for row in rows:
        # Rows come longest first, so the first one sets the padded length.
        full = open_rows and (
            (len(open_rows) + 1) * open_rows[0].length > settings.token_budget
            or (settings.max_rows and len(open_rows) >= settings.max_rows)
        )
        if full:
            batches.append(MicroBatch(tuple(open_rows)))
            open_rows = []
        open_rows.append(row)
    if open_rows:
        batches.append(MicroBatch(tuple(open_rows)))
    return batches


def slices(batches: Sequence[MicroBatch], tokens: int) -> list[tuple[MicroBatch, ...]]:
    """Runs of micro-batches of about `tokens` padded tokens, at least one micro-batch each."""
    found: list[tuple[MicroBatch, ...]] = []
    run: list[MicroBatch] = []
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
    if not settings.share_prefix or not worth or prefix == sample.length:
        return b"#%d" % index
    return b"=" + sample.token_ids[:prefix].tobytes()


def layout(batch: MicroBatch, samples: Sequence[Sample]) -> Layout:
    """Lay a micro-batch out; loss tokens come in the order of rows, members and tokens."""
    shape = (len(batch.rows), batch.length)
    token_ids = np.zeros(shape, np.int64)
    position_ids = np.zeros(shape, np.int64)
    segments = np.full(shape, PADDING, np.int64)
    sources: list[NDArray[np.int64]] = []
    owners: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    for at, row in enumerate(batch.rows):
        if row.prefix:
            token_ids[at, : row.prefix] = samples[row.members[0]].token_ids[: row.prefix]
            position_ids[at, : row.prefix] = np.arange(row.prefix)
            segments[at, : row.prefix] = 0
        start = row.prefix
        for number, index in enumerate(row.members):
            sample = samples[index]
            own = sample.length - row.prefix
            columns = slice(start, start + own)
            token_ids[at, columns] = sample.token_ids[row.prefix :]
            position_ids[at, columns] = np.arange(row.prefix, sample.length)
            segments[at, columns] = number + 1 if row.prefix else 0
            # Column of each of the sample's tokens; the one before a token predicts it.
            where = np.concatenate([np.arange(row.prefix), np.arange(start, start + own)])
            wanted = np.flatnonzero(sample.loss_mask)
            sources.append(at * batch.length + where[wanted - 1])
            owners.append(np.full(wanted.shape, index))
            tokens.append(wanted)
            start += own
    return Layout(
        token_ids,
        position_ids,
        segments,
        np.concatenate(sources).astype(np.int64),
        np.concatenate(owners).astype(np.int64),
        np.concatenate(tokens).astype(np.int64),
    )
