"""What a loss does to a policy: over steps, at the first token, on the first pass and the second."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from services.trainer.tests.builders import largest, sample
from services.trainer.tests.engine.conftest import SPEC, MakeEngine
from services.trainer.tests.engine.test_invariance import shaken

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import (
    Component,
    CrossEntropy,
    Distillation,
    Entropy,
    Kl,
    KlEstimator,
    Loss,
    Ppo,
    Value,
)
from opentinker_trainer.domain.samples import Limits, Sample, check_samples
from opentinker_trainer.domain.tuning import AdamWStep, LoraSpec
from opentinker_trainer.engine.core import TorchEngine
from opentinkerapi.runtime.reasons import Reason

STEP = AdamWStep(learning_rate=3e-3)


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> TorchEngine:
    return make_engine()


def rows() -> list[Sample]:
    return [sample(6, 5, i, advantage=(-1.0) ** i, temperature=0.7 + 0.3 * (i % 2)) for i in range(4)]


def scored(
    engine: TorchEngine, name: str, samples: list[Sample], array: str, *, base: bool = False
) -> list[Sample]:
    """The samples with the policy's (or the base model's) logprobs as one of their arrays."""
    output = engine.forward(name, samples, use_base_model=base)
    return [
        replace(row, **{array: scores.logprobs}) for row, scores in zip(samples, output.scores, strict=True)
    ]


def mean(metrics: dict[str, tuple[float, float]], name: str) -> float:
    total, weight = metrics[name]
    return total / weight


def test_the_first_pass_has_ratio_one_and_the_second_does_not(make_engine: MakeEngine) -> None:
    """B56: logprobs from a pass that was cut otherwise. B23: after a step the ratio has moved."""
    one, other = make_engine(max_rows=1, share_prefix=False, pack=False), make_engine(logit_rows=3)
    for engine in (one, other):
        shaken(engine, "policies/p", SPEC, 2)
    samples = scored(one, "policies/p", rows(), "behavior_logprobs")
    component = Component("main", Ppo(), 20.0)
    first = other.forward_backward("policies/p", samples, [component]).metrics
    assert mean(first, "rollout_corr/logprob_abs_diff") < 1e-5
    assert mean(first, "rollout_corr/ratio") == pytest.approx(1.0, abs=1e-5)
    assert mean(first, "actor/ppo_kl") == pytest.approx(0.0, abs=1e-5)
    assert first["actor/pg_clipfrac"][0] == 0
    other.optim_step("policies/p", replace(STEP, learning_rate=1e-2))
    second = other.forward_backward("policies/p", samples, [component]).metrics
    assert mean(second, "rollout_corr/logprob_abs_diff") > 1e-3
    assert second["actor/pg_clipfrac"][0] > 0


@pytest.mark.parametrize("estimator", [KlEstimator.K2, KlEstimator.K3, KlEstimator.K3_STRAIGHT_THROUGH])
def test_a_kl_term_alone_moves_the_policy_back_to_its_reference(
    engine: TorchEngine, estimator: KlEstimator
) -> None:
    """B15, B24: advantages are 0, and over 50 steps the divergence falls."""
    name = "policies/kl"
    shaken(engine, name, LoraSpec(4, 8.0, ("down_proj", "q_proj")), 4)
    samples = [
        replace(row, advantages=np.zeros(row.length, np.float32))
        for row in scored(engine, name, rows(), "reference_logprobs", base=True)
    ]
    components = [Component("policy", Ppo(), 20.0), Component("kl", Kl(estimator), 20.0)]
    samples = scored(engine, name, samples, "behavior_logprobs")
    history = []
    for _ in range(50):
        output = engine.forward_backward(name, samples, components)
        history.append(mean(output.metrics, "actor/kl_loss"))
        assert largest(engine._policies[name].gradients[""]) > 0
        engine.optim_step(name, STEP)
    assert history[0] > 1e-3
    assert history[-1] < 0.1 * history[0]


def test_k1_pushes_logprobs_down(engine: TorchEngine) -> None:
    """B24: the sign. The gradient of k1 is that of the logprob, whatever the distance."""
    name = "policies/k1"
    shaken(engine, name, SPEC, 4)
    samples = scored(engine, name, rows(), "reference_logprobs", base=True)
    engine.forward_backward(name, samples, [Component("kl", Kl(KlEstimator.K1), 20.0)])
    by_kl = {key: value.clone() for key, value in engine._policies[name].gradients[""].items()}
    engine._policies[name].gradients = {}
    engine.forward_backward(name, samples, [Component("sft", CrossEntropy(), 20.0, coefficient=-1.0)])
    for key, value in engine._policies[name].gradients[""].items():
        torch.testing.assert_close(by_kl[key], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("loss", "metric", "sign"),
    [(Entropy(), "actor/entropy", 1), (Distillation(), "actor/distillation_loss", -1)],
    ids=["entropy", "distillation"],
)
def test_entropy_rises_and_the_distance_to_a_teacher_falls(
    engine: TorchEngine, loss: Loss, metric: str, sign: int
) -> None:
    name = "policies/e"
    shaken(engine, name, SPEC, 4)
    samples = scored(engine, name, rows(), "teacher_logprobs", base=True)
    history = []
    for _ in range(10):
        output = engine.forward_backward(name, samples, [Component("main", loss, 20.0)])
        history.append(mean(output.metrics, metric))
        engine.optim_step(name, STEP)
    assert sign * (history[-1] - history[0]) > 1e-4


def test_a_reply_of_one_token_is_trained_on_with_its_logprob(engine: TorchEngine) -> None:
    """B30: the first token of a reply counts, also as the only one; B51: at its temperature."""
    name = "policies/one"
    engine.create_policy(name, SPEC, seed=0)
    for temperature in (1.0, 0.7):
        row = replace(sample(5, 1, 3, temperature=temperature), behavior_logprobs=None, advantages=None)
        output = engine.forward_backward(name, [row], [Component("sft", CrossEntropy(), 1.0)])
        with torch.no_grad():
            logits = engine.base.model(torch.from_numpy(row.token_ids[None]).long()).logits[0, 4]
        expected = torch.log_softmax(logits / temperature, -1)[int(row.token_ids[5])]
        assert output.loss_sums["sft"] == (pytest.approx(-float(expected), abs=1e-5), 1.0)
        assert output.scores[0].logprobs[5] == pytest.approx(float(expected), abs=1e-5)


def test_rows_without_loss_tokens_are_nothing(engine: TorchEngine) -> None:
    """B16: beside others they change nothing; alone they are refused before anything is computed."""
    name = "policies/none"
    shaken(engine, name, SPEC, 4)
    empty = replace(rows()[0], loss_mask=np.zeros(rows()[0].length, np.bool_))
    component = Component("main", Ppo(), 20.0)
    alone = engine.forward_backward(name, rows(), [component])
    beside = engine.forward_backward(name, [empty, *rows()], [component])
    assert beside.loss_sums["main"] == pytest.approx(alone.loss_sums["main"], rel=1e-6)
    with pytest.raises(ServiceError) as error:
        check_samples([empty], Limits(256, 64), [component])
    assert error.value.reason == Reason.NO_TRAINABLE_TOKENS


def test_a_value_loss_of_a_policy_without_a_value_head_changes_nothing(engine: TorchEngine) -> None:
    name = "policies/headless"
    engine.create_policy(name, SPEC, seed=0)
    samples = [replace(row, returns=np.zeros(row.length, np.float32)) for row in rows()]
    with pytest.raises(ServiceError, match="value head"):
        engine.forward_backward(name, samples, [Component("value", Value(), 1.0)])
    assert not engine._policies[name].gradients
