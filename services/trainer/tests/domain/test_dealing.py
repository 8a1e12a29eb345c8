"""Who computes what: every row once, whatever the number of ranks, and nobody idle who need not be."""

import pytest
from services.trainer.tests.builders import ragged_batch

from opentinker_trainer.domain.dealing import deal, plan_for
from opentinker_trainer.domain.plan import PlanSettings, plan


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("budget", [32, 100_000])
def test_every_row_is_dealt_once(ranks: int, budget: int) -> None:
    samples = ragged_batch()
    settings = PlanSettings(token_budget=budget, share_prefix=False)
    rounds = deal(plan_for(samples, range(len(samples)), settings, ranks), ranks)
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
    batches = plan_for(samples, range(len(samples)), settings, 1)
    assert batches == plan(samples, range(len(samples)), settings)
    assert [round_.of(0) for round_ in deal(batches, 1)] == batches
    assert deal([], 4) == []
