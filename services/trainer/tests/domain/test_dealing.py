"""Who computes what: every row once, whatever the number of ranks, and nobody idle who need not be."""

import pytest
from services.trainer.tests.builders import ragged_batch, sample

from opentinker_trainer.domain.dealing import deal, turns
from opentinker_trainer.domain.plan import MicroBatch, PlanSettings, Row, plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("budget", [32, 100_000])
def test_every_row_is_dealt_once(ranks: int, budget: int) -> None:
    samples = ragged_batch()
    settings = PlanSettings(token_budget=budget, share_prefix=False)
    rounds = deal(plan(samples, range(len(samples)), settings, ranks), ranks)
    dealt = [
        index
        for round_ in rounds
        for rank in range(ranks)
        if (batch := round_.of(rank)) is not None
        for row in batch.rows
        for index in row.members
    ]
    assert sorted(dealt) == list(range(len(samples)))
    busy = sum(rounds[0].of(rank) is not None for rank in range(ranks))
    assert busy == min(ranks, len(samples))
    for round_ in rounds:
        assert round_.tokens == max(batch.tokens for batch in round_.batches)
        assert round_.smallest in round_.batches


def test_one_rank_has_the_plan_as_it_is() -> None:
    samples = ragged_batch()
    settings = PlanSettings(token_budget=64)
    batches = plan(samples, range(len(samples)), settings)
    assert [round_.of(0) for round_ in deal(batches, 1)] == batches
    assert deal([], 4) == []


@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("pack", [True, False])
def test_lanes_get_about_the_same(lanes: int, *, pack: bool) -> None:
    """And never more than the budget."""
    samples = [sample(3, 40 - index, index) for index in range(24)]
    settings = PlanSettings(token_budget=256, share_prefix=False, pack=pack)
    alone = plan(samples, range(len(samples)), settings)
    batches = plan(samples, range(len(samples)), settings, lanes)
    assert len(alone) <= len(batches) < len(alone) + lanes
    assert len(batches) % lanes == 0
    assert max(batch.tokens for batch in batches) <= max(batch.tokens for batch in alone)
    found = turns(deal(batches, 1), lanes)
    assert [round_ for turn in found for round_ in turn.rounds] == deal(batches, 1)
    longest = max(row.length for batch in batches for row in batch.rows)
    for turn in found:
        sizes = [round_.tokens for round_ in turn.rounds]
        assert len(sizes) == lanes
        assert max(sizes) - min(sizes) <= longest


def test_what_is_left_over_and_images_go_one_by_one() -> None:
    rows = [MicroBatch((Row((index,), 0, 8),), packed=False, images=index == 2) for index in range(6)]
    found = turns(deal(rows, 1), 2)
    dealt = [[round_.batches[0].rows[0].members[0] for round_ in turn.rounds] for turn in found]
    assert dealt == [[0, 1], [2], [3, 4], [5]]
    rows = rows[:1] + rows[2:]
    found = turns(deal(rows, 1), 2)
    dealt = [[round_.batches[0].rows[0].members[0] for round_ in turn.rounds] for turn in found]
    assert dealt == [[0], [2], [3, 4], [5]]
