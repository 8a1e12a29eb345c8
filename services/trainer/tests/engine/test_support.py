"""B52: passes over rows whose tokens were chosen among few ids."""

from dataclasses import replace

import numpy as np
import pytest
from services.trainer.tests.builders import sample
from services.trainer.tests.engine.cases import narrow
from services.trainer.tests.engine.conftest import SPEC
from services.trainer.tests.engine.test_invariance import shaken
from services.trainer.tests.engine.test_training import mean

from opentinker_trainer.domain.losses import Component, Ppo
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.support import Support
from opentinker_trainer.engine.columns import Columns
from opentinker_trainer.engine.core import TorchEngine

POLICY = "policies/support"


@pytest.fixture(scope="module")
def engine(shared_engine: TorchEngine) -> TorchEngine:
    shaken(shared_engine, POLICY, SPEC, 4)
    return shared_engine


def support(sizes: list[int], ids: list[int]) -> Support:
    return Support(np.array(sizes, np.int32), np.array(ids, np.int32))


def logprobs(engine: TorchEngine, rows: list[Sample]) -> list[np.ndarray]:
    return [scores.logprobs for scores in engine.forward(POLICY, rows).scores]


def test_columns_gather_the_sets_of_any_tokens() -> None:
    rows = [
        replace(sample(2, 2, 1), support=support([0, -1, 1, 2], [7, 8, 9])),
        sample(2, 1, 2),
        replace(sample(2, 2, 3), support=support([1, 0, 3, 0], [5, 7, 1, 2])),
    ]
    supports = Columns.of(rows).supports
    assert supports is not None
    part = supports.at(np.array([9, 3, 2, 0, 5, 7]))
    sets = np.split(part.ids, part.starts[1:-1])
    assert [each.tolist() for each in sets] == [[7, 1, 2], [8, 9], [7], [], [], [5]]
    assert Columns.of([sample(2, 1, 0)]).supports is None


def test_a_logprob_is_one_among_the_ids_of_its_set(engine: TorchEngine) -> None:
    """Against the logprobs of every id in the last place, each of a row of its own."""
    row = sample(6, 3, 1, temperature=0.7)
    ids = [int(row.token_ids[-1]), 3, 77, 200, 12]

    def ending(token: int) -> Sample:
        return replace(row, token_ids=np.append(row.token_ids[:-1], np.int32(token)))

    each = np.array([found[-1] for found in logprobs(engine, [ending(token) for token in ids])], np.float64)
    sizes = [0] * (row.length - 1) + [len(ids)]
    (found,) = logprobs(engine, [replace(row, support=support(sizes, ids))])
    assert found[-1] == pytest.approx(each[0] - np.log(np.exp(each).sum()), abs=1e-5)
    (whole,) = logprobs(engine, [row])
    np.testing.assert_array_equal(found[:-1], whole[:-1])


def test_the_whole_vocabulary_written_out_is_no_support(engine: TorchEngine) -> None:
    row = sample(6, 3, 1)
    size = engine.base.vocab_size
    everything = support([size] * row.length, list(range(size)) * row.length)
    np.testing.assert_array_equal(*logprobs(engine, [row, replace(row, support=everything)]))


def test_the_ratio_to_a_sampler_with_the_same_sets_is_one(engine: TorchEngine) -> None:
    """And without the sets it is the mass that they kept, though the policy is the same."""
    rows = [sample(6, 5, i, temperature=0.7 + 0.3 * (i % 2)) for i in range(4)]
    rows = [replace(row, support=narrow(row, 40 + number)) for number, row in enumerate(rows)]
    sampled = [
        replace(row, behavior_logprobs=found) for row, found in zip(rows, logprobs(engine, rows), strict=True)
    ]
    ppo = [Component("ppo", Ppo(), 20.0)]
    aware = engine.forward_backward(POLICY, sampled, ppo)
    assert mean(aware.metrics, "actor/ppo_kl") == pytest.approx(0, abs=1e-6)
    forgetful = engine.forward_backward(POLICY, [replace(row, support=None) for row in sampled], ppo)
    assert mean(forgetful.metrics, "actor/ppo_kl") > 0.5
