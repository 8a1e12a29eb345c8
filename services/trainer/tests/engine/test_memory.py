"""B115: nothing grows with the number of steps."""

import psutil
import pytest
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.domain.tuning import AdamWStep


@pytest.mark.slow
def test_two_hundred_steps_take_no_more_memory(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.create_policy("policies/p", SPEC, seed=0)
    rows = ragged_batch()
    process = psutil.Process()

    def steps(count: int) -> int:
        for _ in range(count):
            engine.forward_backward("policies/p", rows, [Component("main", Ppo(), 50.0)])
            engine.optim_step("policies/p", AdamWStep(1e-3, clip_norm=1.0))
        return int(process.memory_info().rss)

    before = steps(20)
    assert steps(200) < 1.05 * before
