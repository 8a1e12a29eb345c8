"""The order of rows: a pure function of seed and place, with nothing left out and nothing said twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import InvalidArgument
from opentinker.supervised.batches import Batches, BatchSize

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=30)
SIZES = st.one_of(
    st.integers(1, 12).map(lambda rows: BatchSize(rows=rows)),
    st.integers(20, 90).map(lambda tokens: BatchSize(tokens=tokens)),
)


@given(LENGTHS, SIZES, st.integers(0, 5), st.integers(1, 3))
def test_epochs_go_through_every_row_and_fill_batches(
    lengths: list[int], size: BatchSize, seed: int, epochs: int
) -> None:
    batches = Batches(lengths, size, seed=seed, epochs=epochs)
    made = list(batches.follow())
    assert len(made) == batches.count()
    seen = [index for batch in made for index in batch.indices]
    for epoch in range(epochs):
        part = seen[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert Counter(part) == Counter(range(len(lengths)))
    for batch in made[:-1]:
        total = sum(lengths[index] for index in batch.indices)
        if size.rows is not None:
            assert len(batch.indices) == size.rows
        else:
            assert size.tokens is not None
            following = batches.index(batch.next_ordinal)
            assert total <= size.tokens < total + lengths[following]
    assert made[-1].next_ordinal == epochs * len(lengths)


@given(LENGTHS, SIZES, st.integers(0, 5))
def test_b99_a_run_goes_on_from_a_place_as_if_nothing_had_been(
    lengths: list[int], size: BatchSize, seed: int
) -> None:
    straight = Batches(lengths, size, seed=seed)
    line = straight.follow()
    ten = [next(line) for _ in range(10)]
    resumed = Batches(lengths, size, seed=seed).follow(ten[4].next_ordinal)
    assert [next(resumed) for _ in range(5)] == ten[5:]


def test_orders_differ_by_seed_and_epoch_and_are_the_same_everywhere() -> None:
    def order(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        batches = Batches([1] * 8, BatchSize(rows=8), seed=seed, shuffle=shuffle)
        return [batches.index(epoch * 8 + place) for place in range(8)]

    assert order(0, 0) == [5, 0, 6, 7, 4, 3, 1, 2]
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(0, 3, shuffle=False) == list(range(8))


def test_bad_sizes_are_refused() -> None:
    for size in ({}, {"rows": 1, "tokens": 1}, {"rows": 0}, {"tokens": 0}):
        with pytest.raises(InvalidArgument, match="batch"):
            BatchSize(**size)
    with pytest.raises(InvalidArgument, match="do not hold the longest row, which has 9"):
        Batches([3, 9], BatchSize(tokens=8), seed=0)
