"""The cut into micro-batches: complete, within its budget, and a pure function of the request."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from services.trainer.tests.builders import ragged_batch, sample

from opentinker_trainer.domain.plan import PADDING, PlanSettings, layout, plan, slices
from opentinker_trainer.domain.samples import Sample

rows = st.lists(
    st.builds(
        sample,
        prompt=st.integers(1, 20),
        answer=st.integers(1, 12),
        seed=st.integers(0, 5),
        prompt_seed=st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)
launches = st.builds(
    PlanSettings,
    token_budget=st.integers(1, 120),
    max_rows=st.integers(0, 4),
    share_prefix=st.booleans(),
    pack=st.booleans(),
    max_shared_row_tokens=st.integers(1, 60),
)


@settings(max_examples=100, deadline=None)
@given(rows, launches)
def test_every_loss_token_is_computed_once_from_its_own_past(
    samples: list[Sample], launch: PlanSettings
) -> None:
    batches = plan(samples, range(len(samples)), launch)
    seen: list[tuple[int, int]] = []
    for batch in batches:
        if len(batch.rows) > 1:
            assert batch.tokens <= launch.token_budget
        assert not launch.max_rows or len(batch.rows) <= launch.max_rows
        cut = layout(batch, samples)
        assert cut.token_ids.shape == batch.shape
        assert (PADDING in cut.segments) <= (not launch.pack)
        ends = np.cumsum(cut.packed_lengths or (batch.shape[1],))
        for source, index, token in zip(cut.sources, cut.samples, cut.tokens, strict=True):
            row, column = divmod(int(source), batch.shape[1])
            packed_row = int(np.searchsorted(ends, column, side="right"))
            keys = np.arange(batch.shape[1])
            visible = (keys <= column) & (keys >= (ends[packed_row - 1] if packed_row else 0))
            visible &= (cut.segments[row] == 0) | (cut.segments[row] == cut.segments[row, column])
            visible &= cut.segments[row] != PADDING
            # What the column sees is exactly the sample before the token, at its own positions.
            assert cut.token_ids[row, visible].tolist() == samples[index].token_ids[:token].tolist()
            assert cut.position_ids[row, visible].tolist() == list(range(token))
            seen.append((int(index), int(token)))
    expected = [(i, int(t)) for i, s in enumerate(samples) for t in np.flatnonzero(s.loss_mask)]
    assert sorted(seen) == sorted(expected)
    assert plan(samples, range(len(samples)), launch) == batches


def test_a_group_shares_its_prompt() -> None:
    group = [sample(35, 12, seed, prompt_seed=1) for seed in range(8)]
    (batch,) = plan(group, range(8), PlanSettings())
    assert [(row.prefix, row.length) for row in batch.rows] == [(35, 35 + 8 * 12)]
    alone = plan(group, range(8), PlanSettings(share_prefix=False))
    assert sum(b.tokens for b in alone) == 8 * 47


def test_packed_rows_have_no_padding() -> None:
    samples = [sample(3, 5 * length, length) for length in range(1, 9)]
    total = sum(sample.length for sample in samples)
    packed = plan(samples, range(8), PlanSettings(token_budget=100))
    assert sum(batch.tokens for batch in packed) == total
    assert max(batch.tokens for batch in packed) <= 100
    padded = plan(samples, range(8), PlanSettings(token_budget=100, pack=False))
    assert sum(batch.tokens for batch in padded) > total


def test_slices_hold_every_micro_batch_once_and_in_order() -> None:
    samples = [sample(3, 5, seed) for seed in range(20)]
    batches = plan(samples, range(20), PlanSettings(token_budget=16))
    cut = slices(batches, 40)
    assert [batch for run in cut for batch in run] == batches
    assert [len(run) for run in cut] == [2] * 5
    # A micro-batch is never cut, however small a slice shall be.
    assert slices(batches, 1) == [(batch,) for batch in batches]
    assert slices([], 40) == []


def test_short_prefixes_are_not_worth_it() -> None:
    group = [sample(1, 30, seed, prompt_seed=1) for seed in range(4)]
    batches = plan(group, range(4), PlanSettings())
    assert all(row.prefix == 0 for batch in batches for row in batch.rows)


def test_left_out_rows_are_not_planned() -> None:
    samples = ragged_batch()
    batches = plan(samples, [1, 5], PlanSettings())
    assert sorted(index for batch in batches for row in batch.rows for index in row.members) == [1, 5]
