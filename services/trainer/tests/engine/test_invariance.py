"""The invariance harness: any cut, order or padding gives the same loss, gradient and metrics."""

from dataclasses import replace

import numpy as np
import pytest
from services.trainer.tests.builders import gradient_of, largest, largest_difference, ragged_batch
from services.trainer.tests.engine.conftest import SPEC, MakeEngine

from opentinker_trainer.domain.losses import Component, CrossEntropy, ImportanceSampling, Loss, Ppo
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.domain.tuning import AdamWStep
from opentinker_trainer.engine.core import TorchEngine
from opentinker_trainer.engine.objective import BackwardOutput

BOUND = 1e-6
LOSSES: list[Loss] = [ImportanceSampling(), Ppo(0.2, 0.28, 3.0), CrossEntropy()]


def run(engine: TorchEngine, samples: list[Sample], loss: Loss, **options: bool) -> BackwardOutput:
    """Two steps of an own policy, so that B is not zero, then one pass."""
    policy = engine.create_policy("policies/p", SPEC, seed=3)
    generator = np.random.default_rng(5)
    for name, parameter in policy.parameters.items():
        if ".lora_B." in name:
            values = 0.05 * generator.standard_normal(tuple(parameter.shape))
            parameter.data.copy_(parameter.new_tensor(values))
    component = Component("main", loss, denominator=float(sum(s.loss_tokens for s in samples)))
    return engine.forward_backward("policies/p", samples, [component], **options)


def means(output: BackwardOutput) -> dict[str, float]:
    return {name: total / weight for name, (total, weight) in output.metrics.items() if weight}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_any_cut_gives_the_same_loss_gradient_and_metrics(make_engine: MakeEngine, loss: Loss) -> None:
    samples = ragged_batch()
    whole = make_engine(token_budget=100_000, share_prefix=False, pack=False)
    expected = run(whole, samples, loss)
    gradient = gradient_of(whole, "policies/p")
    assert largest(gradient) > 1e-3
    cuts = [{"max_rows": rows, "share_prefix": share} for rows in (1, 2, 4, 8) for share in (False, True)]
    cuts += [{"token_budget": 64}, {"logit_rows": 5}, {"max_shared_row_tokens": 24}]
    for cut in cuts:
        engine = make_engine(**cut)
        output = run(engine, samples, loss)
        assert largest_difference(gradient_of(engine, "policies/p"), gradient) < BOUND, cut
        assert means(output) == pytest.approx(means(expected), abs=BOUND, rel=1e-5), cut
        assert output.loss_sums["main"] == pytest.approx(expected.loss_sums["main"], rel=1e-6), cut


def test_in_float64_the_cuts_agree_to_rounding(make_engine: MakeEngine) -> None:
    samples = ragged_batch()
    whole = make_engine(dtype="float64", token_budget=100_000, share_prefix=False)
    run(whole, samples, Ppo())
    for cut in ({"max_rows": 1, "share_prefix": False}, {"share_prefix": True}, {"attention": "eager"}):
        engine = make_engine(dtype="float64", **cut)
        run(engine, samples, Ppo())
        difference = largest_difference(gradient_of(engine, "policies/p"), gradient_of(whole, "policies/p"))
        assert difference < 1e-7  # transformers norms and rotary angles stay float32


def test_order_and_padding_do_not_matter(shared_engine: TorchEngine) -> None:
    samples = ragged_batch()
    expected = run(shared_engine, samples, Ppo())
    gradient = gradient_of(shared_engine, "policies/p")
    logprobs = [score.logprobs for score in expected.scores]

    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = run(shared_engine, [samples[i] for i in order], Ppo())
    assert largest_difference(gradient_of(shared_engine, "policies/p"), gradient) < BOUND
    for at, index in enumerate(order):
        np.testing.assert_allclose(shuffled.scores[at].logprobs, logprobs[index], atol=1e-5)

    # Five more columns that nobody trains on (B06).
    padded = [pad(sample, 5) for sample in samples]
    output = run(shared_engine, padded, Ppo())
    assert largest_difference(gradient_of(shared_engine, "policies/p"), gradient) < BOUND
    assert means(output) == pytest.approx(means(expected), abs=BOUND, rel=1e-5)


def pad(sample: Sample, count: int) -> Sample:
    def longer(array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else np.concatenate([array, np.zeros(count, array.dtype)])

    return replace(
        sample,
        token_ids=longer(sample.token_ids),
        loss_mask=longer(sample.loss_mask),
        behavior_logprobs=longer(sample.behavior_logprobs),
        advantages=longer(sample.advantages),
    )


def test_two_halves_and_a_step_are_one_whole_and_a_step(make_engine: MakeEngine) -> None:
    """B94: the gradient accumulates until OptimStep; a deferred denominator divides the same."""
    engine = make_engine(dtype="float64")
    samples = ragged_batch()
    count = float(sum(sample.loss_tokens for sample in samples))
    known = Component("main", Ppo(), denominator=count)
    deferred = Component("main", Ppo(), denominator=None)
    step = AdamWStep(learning_rate=1e-2, clip_norm=1.0)
    results = []
    for parts, component in [
        ([samples], known),
        ([samples[:3], samples[3:]], known),
        ([samples[:3], samples[3:]], deferred),
    ]:
        policy = engine.create_policy("policies/p", SPEC, seed=0)
        for part in parts:
            engine.forward_backward("policies/p", part, [component])
        denominators = {} if component.denominator else {"main": count}
        report = engine.optim_step("policies/p", step, denominators)
        assert report.step == 1
        results.append(({k: v.clone() for k, v in policy.parameters.items()}, report.grad_norm))
    for parameters, norm in results[1:]:
        assert largest_difference(parameters, results[0][0]) < 1e-5
        assert norm == pytest.approx(results[0][1], rel=1e-6)


def test_several_components_add_up(make_engine: MakeEngine) -> None:
    """Known and deferred denominators in one request, with coefficients, on some rows only."""
    engine = make_engine(dtype="float64")
    samples = ragged_batch()
    engine.create_policy("policies/p", SPEC, seed=0)
    parts = [
        Component("policy", Ppo(), denominator=7.0, coefficient=2.0),
        Component("behave", CrossEntropy(), denominator=None, coefficient=0.5),
    ]
    marked = [replace(s, components=frozenset({"policy"}) if i % 2 else None) for i, s in enumerate(samples)]
    engine.forward_backward("policies/p", marked, parts)
    together = engine._policies["policies/p"]._total({"behave": 3.0})

    engine.create_policy("policies/p", SPEC, seed=0)
    engine.forward_backward("policies/p", samples, [Component("policy", Ppo(), 7.0 / 2.0)])
    engine.forward_backward("policies/p", samples[::2], [Component("behave", CrossEntropy(), 3.0 / 0.5)])
    assert largest_difference(together, gradient_of(engine, "policies/p")) < 1e-7


def test_rows_that_cannot_contribute_are_left_out(shared_engine: TorchEngine) -> None:
    samples = [
        replace(s, advantages=s.advantages * (i % 2)) if s.advantages is not None else s
        for i, s in enumerate(ragged_batch())
    ]
    full = run(shared_engine, samples, Ppo())
    gradient = gradient_of(shared_engine, "policies/p")
    short = run(shared_engine, samples, Ppo(), skip_inert=True)
    assert largest_difference(gradient_of(shared_engine, "policies/p"), gradient) < BOUND
    assert [score.skipped for score in short.scores] == [True, False] * 4
    assert short.loss_sums["main"] == pytest.approx(full.loss_sums["main"])
    assert means(short)["actor/pg_loss"] == pytest.approx(means(full)["actor/pg_loss"])
    assert short.trained_tokens < full.trained_tokens
