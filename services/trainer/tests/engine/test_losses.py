"""Losses, divergences and corrections against the float64 reference, and what each option does."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from services.trainer.tests import golden
from torch import Tensor

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.losses import (
    Cispo,
    Component,
    Correction,
    CorrectionKind,
    CrossEntropy,
    Distillation,
    DppoTv,
    Dro,
    Entropy,
    Gmpo,
    Gspo,
    ImportanceSampling,
    Kl,
    KlEstimator,
    Loss,
    Ppo,
    Sapo,
    Value,
)
from opentinker_trainer.domain.registered import Art, PrimeRl, ReinforceIs, Vespo
from opentinker_trainer.engine.corrections import correction_weights
from opentinker_trainer.engine.divergences import divergence
from opentinker_trainer.engine.losses import token_losses
from opentinker_trainer.engine.token_inputs import TokenInputs, TokenMetrics
from opentinkerapi.runtime.reasons import Reason

EXACT = 1e-9


def t(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(expected: object) -> object:
    return pytest.approx(expected, abs=EXACT, rel=0)


INPUTS = TokenInputs(
    torch.tensor(golden.SEQUENCES),
    behavior_logprobs=t(golden.OLD),
    advantages=t(golden.ADVANTAGES),
    reference_logprobs=t(golden.REFERENCE),
    teacher_logprobs=t(golden.REFERENCE),
)
CORRECTED = replace(INPUTS, behavior_logprobs=t(golden.ROLLOUT), proximal_logprobs=t(golden.OLD))


def losses_of(
    loss: Loss,
    inputs: TokenInputs = INPUTS,
    correction: Correction | None = None,
    logprobs: Sequence[float] = golden.LOGPROBS,
) -> tuple[Tensor, TokenMetrics]:
    return token_losses(Component("main", loss, 1.0, correction=correction), t(logprobs), inputs)


def total(loss: Loss, inputs: TokenInputs = INPUTS, correction: Correction | None = None) -> float:
    return float(losses_of(loss, inputs, correction)[0].sum())


def seq_mean_token_mean(loss: Loss, inputs: TokenInputs = INPUTS) -> float:
    """As a client asks for it: weights 1 / length, divided by the number of sequences."""
    return total(loss, replace(inputs, weights=1 / t(golden.LENGTHS))) / 2


# Policy losses.


def test_l1_ppo_with_both_clips() -> None:
    losses, metrics = losses_of(Ppo(0.2, 0.28, 3.0))
    assert losses.tolist() == same(golden.L1_TOKENS)
    # Tokens 1 (ratio 1.49) and 4 (0.61, A < 0) are clipped.
    assert metrics["actor/pg_clipfrac"].tolist() == [False, True, False, False, True]
    assert float(metrics["actor/ppo_kl"].sum()) == same(sum(golden.OLD) - sum(golden.LOGPROBS))


def test_l1_every_aggregation_is_weights_and_a_denominator() -> None:
    """B01: a sum over sequences is divided by one number, whatever the micro-batches are."""
    loss = Ppo(0.2, 0.28, 3.0)
    assert {
        "token_mean": total(loss) / 5,
        "token_sum": total(loss),
        "seq_mean_token_sum": total(loss) / 2,
        "seq_mean_token_sum_norm": total(loss) / (2 * 3),
        "seq_mean_token_mean": seq_mean_token_mean(loss),
    } == same(golden.L1_AGGREGATED)


def test_l2_gspo_has_one_ratio_a_sequence() -> None:
    assert seq_mean_token_mean(Gspo(3e-4, 4e-4)) == same(golden.L2_SEQ_MEAN_TOKEN_MEAN)
    # Without a bound that acts, -ratio A shows the ratios.
    losses, metrics = losses_of(Gspo(0.5, 0.5))
    ratios = (-losses / INPUTS.advantages).tolist()
    assert ratios == same([golden.L2_RATIOS[sequence] for sequence in golden.SEQUENCES])
    assert not metrics["actor/pg_clipfrac"].any()


def test_l3_cispo_bounds_the_weight_not_the_gradient() -> None:
    assert total(Cispo(0.8, 1.28)) / 5 == same(golden.L3_TOKEN_MEAN)
    assert total(Cispo(0.0, 5.0)) / 5 == same(golden.L3_BOUND_5_TOKEN_MEAN)
    # The name of an option never means a bound in one place and a distance from 1 in another.
    assert total(Cispo(0.8, 1.28)) / 5 != pytest.approx(golden.L3_BOUND_5_TOKEN_MEAN, abs=1e-3)


def test_l4_sapo() -> None:
    assert total(Sapo(1.0, 1.05)) / 5 == same(golden.L4_TOKEN_MEAN)
    assert seq_mean_token_mean(Sapo(1.0, 1.05)) == same(golden.L4_SEQ_MEAN_TOKEN_MEAN)


def test_l5_gmpo() -> None:
    assert seq_mean_token_mean(Gmpo(0.4, 0.4)) == same(golden.L5_SEQ_MEAN)


def test_l6_dppo_tv() -> None:
    losses, metrics = losses_of(DppoTv(0.15, 0.15, 20.0))
    assert losses.tolist() == same(golden.L6_TOKENS)
    assert float(losses.mean()) == same(golden.L6_TOKEN_MEAN)
    assert metrics["actor/pg_clipfrac"].tolist() == [False, True, False, False, False]


def test_l8_importance_sampling() -> None:
    assert total(ImportanceSampling()) == same(golden.L8_SUM)


def test_l10_dro() -> None:
    assert total(Dro(0.1)) / 5 == same(golden.L10_TOKEN_MEAN)


def test_registered_losses() -> None:
    to_rollout = replace(INPUTS, behavior_logprobs=t(golden.ROLLOUT))
    assert total(PrimeRl(), to_rollout) / 5 == same(golden.L7_TOKEN_MEAN)
    assert total(ReinforceIs(), to_rollout) / 5 == same(golden.L9_TOKEN_MEAN)
    assert total(Vespo()) / 5 == same(golden.L11_TOKEN_MEAN)
    assert total(Art()) / (5 + 1e-6) == same(golden.L12_TOKEN_MEAN)
    # The first two take their ratio to the sampler even where there is a proximal policy.
    assert total(PrimeRl(), CORRECTED) / 5 == same(golden.L7_TOKEN_MEAN)
    assert total(ReinforceIs(), CORRECTED) / 5 == same(golden.L9_TOKEN_MEAN)


def test_l13_value_loss() -> None:
    inputs = TokenInputs(
        torch.tensor([0, 1]), returns=t([1.0, 0.0]), old_values=t([0.4, 0.4]), values=t([0.5, 0.9])
    )
    losses, metrics = losses_of(Value(0.2), inputs, logprobs=[-1.0, -1.0])
    assert float(losses.mean()) == same(golden.L13_MEAN)
    assert float(losses_of(Value(), inputs, logprobs=[-1.0, -1.0])[0].mean()) == same(golden.L13_MEAN)
    assert metrics["critic/vf_loss"].tolist() == same([0.125, 0.405])
    assert not metrics["critic/vf_clipfrac"].any()
    far = replace(inputs, old_values=t([0.9, 0.1]))
    _, metrics = losses_of(Value(0.1), far, logprobs=[-1.0, -1.0])
    assert metrics["critic/vf_clipfrac"].tolist() == [False, False]
    worse = replace(inputs, old_values=t([0.3, 1.5]))
    losses, metrics = losses_of(Value(0.1), worse, logprobs=[-1.0, -1.0])
    assert metrics["critic/vf_clipfrac"].tolist() == [True, True]
    assert losses.tolist() == same([0.5 * 0.6**2, 0.5 * 1.4**2])


def test_a_value_loss_without_a_value_head_is_refused() -> None:
    with pytest.raises(ServiceError, match="value head") as error:
        losses_of(Value(), replace(INPUTS, returns=t([0.0] * 5)))
    assert error.value.reason == Reason.UNSUPPORTED_OPTION


def test_cross_entropy_takes_weights_of_any_sign() -> None:
    weights = [1.0, -2.0, 0.0, 0.5, 1.0]
    losses, _ = losses_of(CrossEntropy(), replace(INPUTS, weights=t(weights)))
    assert losses.tolist() == same([-w * lp for w, lp in zip(weights, golden.LOGPROBS, strict=True)])
    unweighted, _ = losses_of(CrossEntropy())
    assert unweighted.tolist() == same([-lp for lp in golden.LOGPROBS])


def test_entropy_loss_is_its_negative() -> None:
    losses, _ = losses_of(Entropy(), replace(INPUTS, entropy=t([1.0, 2.0, 3.0, 4.0, 5.0])))
    assert losses.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]


# Divergences.

ESTIMATORS = list(KlEstimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_k1_estimators(estimator: KlEstimator) -> None:
    name = "k3" if estimator is KlEstimator.K3_STRAIGHT_THROUGH else estimator.value
    for d, expected in [(0.5, golden.K1_AT_PLUS), (-0.5, golden.K1_AT_MINUS)]:
        assert divergence(estimator, t([d - 2.0]), t([-2.0])).item() == same(expected[name])


@pytest.mark.parametrize("estimator", [KlEstimator.K3, KlEstimator.K3_STRAIGHT_THROUGH])
def test_k2_far_away_k3_is_bounded(estimator: KlEstimator) -> None:
    value = divergence(estimator, t([-31.0]), t([-1.0])).item()
    assert value == same(golden.K2_BOUNDED)
    assert value != pytest.approx(golden.K2_UNBOUNDED)


def test_k3_and_k4_token_means() -> None:
    """K4 is K3 with importance weights."""
    for kind in (Kl, Distillation):
        assert total(kind(KlEstimator.K3)) / 5 == same(golden.K3_TOKEN_MEAN)
        assert total(kind(KlEstimator.K3, importance_weighted=True)) / 5 == same(golden.K4_TOKEN_MEAN)
    _, metrics = losses_of(Kl(KlEstimator.K3))
    assert float(metrics["actor/kl_loss"].mean()) == same(golden.K3_TOKEN_MEAN)


def slope_of(estimator: KlEstimator, d: float) -> float:
    logprob = t([d - 2.0]).requires_grad_()
    (slope,) = torch.autograd.grad(divergence(estimator, logprob, t([-2.0])).sum(), logprob)
    return float(slope)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_k6_gradients_of_the_estimators(estimator: KlEstimator) -> None:
    """B15: a KL term moves the policy."""
    assert slope_of(estimator, 0.5) == same(golden.K6_SLOPES[estimator.value])
    if estimator is not KlEstimator.K3_STRAIGHT_THROUGH:
        step = 1e-6
        up, down = (divergence(estimator, t([0.5 + s - 2.0]), t([-2.0])).item() for s in (step, -step))
        assert slope_of(estimator, 0.5) == pytest.approx((up - down) / (2 * step), abs=1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("d", [-30.0, -5.0, -2.6, 30.0])
def test_bounds_do_not_cut_the_gradient_off(estimator: KlEstimator, d: float) -> None:
    """B15: far from the reference the pull back stays, of the right sign and bounded."""
    slope = slope_of(estimator, d)
    assert slope * (1.0 if estimator is KlEstimator.K1 else d) > 0
    assert abs(slope) <= 20


def test_importance_weighted_kl_is_differentiated_through_the_weight() -> None:
    logprobs = t(golden.LOGPROBS).requires_grad_()
    component = Component("kl", Kl(KlEstimator.K3, importance_weighted=True), 1.0)
    (gradient,) = torch.autograd.grad(token_losses(component, logprobs, INPUTS)[0].sum(), logprobs)
    step = 1e-6
    for index in range(5):
        moved = [[lp + s * (at == index) for at, lp in enumerate(golden.LOGPROBS)] for s in (step, -step)]
        up, down = (float(losses_of(component.loss, logprobs=each)[0].sum()) for each in moved)
        assert float(gradient[index]) == pytest.approx((up - down) / (2 * step), abs=1e-8)


# Corrections.


def weights_of(correction: Correction, inputs: TokenInputs = CORRECTED) -> list[float]:
    weights: list[float] = correction_weights(correction, inputs)[0].tolist()
    return weights


def by_sequence(values: Sequence[float]) -> list[float]:
    return [values[sequence] for sequence in golden.SEQUENCES]


def test_o1_to_o5_correction_weights() -> None:
    kinds = CorrectionKind
    assert weights_of(Correction(kinds.NONE)) == same(golden.O1_RATIOS)
    assert weights_of(Correction(kinds.TOKEN_TRUNCATE, high=1.5)) == same(golden.O2_TRUNCATED)
    assert weights_of(Correction(kinds.TOKEN_MASK, 0.5, 1.5)) == same(golden.O3_MASKED)
    products = by_sequence(golden.O4_PRODUCTS)
    assert weights_of(Correction(kinds.SEQUENCE_TRUNCATE, high=100.0)) == same(products)
    truncated = [min(product, 1.4) for product in products]
    assert weights_of(Correction(kinds.SEQUENCE_TRUNCATE, high=1.4)) == same(truncated)
    masked = by_sequence(golden.O5_SEQUENCE_MASKED)
    assert weights_of(Correction(kinds.SEQUENCE_MASK, high=1.4)) == same(masked)
    # The geometric means of O4 lie on either side of the bounds; inside, tokens keep their own weight.
    first, second = golden.O4_GEOMETRIC_MEANS
    keeps_first = Correction(kinds.GEOMETRIC_MASK, second + 1e-9, first + 1e-9)
    assert weights_of(keeps_first) == same([*golden.O1_RATIOS[:3], 0.0, 0.0])
    keeps_second = Correction(kinds.GEOMETRIC_MASK, second - 1e-9, first - 1e-9)
    assert weights_of(keeps_second) == same([0.0, 0.0, 0.0, *golden.O1_RATIOS[3:]])


def test_o6_truncated_ppo() -> None:
    correction = Correction(CorrectionKind.TOKEN_TRUNCATE, high=1.5)
    assert total(Ppo(0.2, 0.28), CORRECTED, correction) / 5 == same(golden.O6_TOKEN_MEAN)


def test_o10_decoupled_ppo_keeps_the_denominator() -> None:
    """Tokens that a mask leaves out still count."""
    correction = Correction(CorrectionKind.TOKEN_MASK, high=1.5)
    losses, metrics = losses_of(Ppo(0.2, 0.2), CORRECTED, correction)
    assert float(losses.sum()) / 5 == same(golden.O10_TOKEN_MEAN)
    assert metrics["rollout_corr/clip_fraction"].tolist() == [False, True, False, False, False]
    decoupled = total(Ppo(0.2, 0.2), CORRECTED, Correction(CorrectionKind.NONE))
    by_hand = [
        w * loss for w, loss in zip(golden.O1_RATIOS, losses_of(Ppo(0.2, 0.2))[0].tolist(), strict=True)
    ]
    assert decoupled == same(sum(by_hand))


def test_o8_distance_of_trainer_and_sampler() -> None:
    for inputs, logprobs in [
        (CORRECTED, golden.LOGPROBS),
        (replace(CORRECTED, proximal_logprobs=None), golden.OLD),
    ]:
        _, metrics = losses_of(ImportanceSampling(), inputs, logprobs=logprobs)
        found = {name: float(metrics[f"rollout_corr/{name}"].mean()) for name in golden.O8}
        assert found == same(golden.O8)
        ratios = metrics["rollout_corr/ratio"]
        assert ratios.tolist() == same(golden.O1_RATIOS)
        assert metrics["rollout_corr/ratio_squared"].tolist() == same((ratios**2).tolist())


def test_a_token_in_a_kept_sequence_is_bounded() -> None:
    """B58: a ratio of 50 inside a sequence that passes the mask."""
    inputs = TokenInputs(
        torch.zeros(3, dtype=torch.int64),
        behavior_logprobs=t([-6.0, -1.0, -1.0]),
        proximal_logprobs=t([-6.0 + math.log(50), -1.0 - math.log(5), -1.0 - math.log(10)]),
        advantages=t([1.0, 1.0, 1.0]),
    )
    open_ended = Correction(CorrectionKind.GEOMETRIC_MASK, 0.99, 1.01)
    assert weights_of(open_ended, inputs) == same([50.0, 0.2, 0.1])
    weights, touched = correction_weights(replace(open_ended, token_high=2.0), inputs)
    assert weights.tolist() == same([2.0, 0.2, 0.1])
    assert touched.tolist() == [True, False, False]
    for kind, bounds in [
        (CorrectionKind.TOKEN_TRUNCATE, {"high": 2.0}),
        (CorrectionKind.TOKEN_MASK, {"high": 2.0}),
        (CorrectionKind.SEQUENCE_TRUNCATE, {"high": 2.0}),
        (CorrectionKind.SEQUENCE_MASK, {"high": 2.0}),
    ]:
        assert max(weights_of(Correction(kind, **bounds), inputs)) <= 2.0


def test_the_correction_has_no_gradient() -> None:
    logprobs = t(golden.LOGPROBS).requires_grad_()
    correction = Correction(CorrectionKind.TOKEN_TRUNCATE, high=1.5)
    component = Component("main", ImportanceSampling(), 1.0, correction=correction)
    (gradient,) = torch.autograd.grad(token_losses(component, logprobs, CORRECTED)[0].sum(), logprobs)
    ratios = (logprobs.detach() - t(golden.OLD)).exp()
    assert gradient.tolist() == same((-ratios * t(golden.ADVANTAGES) * t(golden.O2_TRUNCATED)).tolist())


# What holds for all of them.

POLICY_LOSSES: list[Loss] = [
    ImportanceSampling(),
    Ppo(),
    Gspo(0.2, 0.2),
    Cispo(),
    Sapo(),
    Gmpo(0.3, 0.3),
    DppoTv(),
    Dro(),
    PrimeRl(),
    ReinforceIs(),
    Art(),
    Vespo(),
]


def name_of(loss: Loss) -> str:
    return type(loss).__name__


@pytest.mark.parametrize("loss", POLICY_LOSSES, ids=name_of)
def test_on_policy_every_loss_has_the_policy_gradient(loss: Loss) -> None:
    """B56: with the trainer's own logprobs the ratio is 1, nothing is clipped, nothing has drifted."""
    logprobs = t(golden.LOGPROBS).requires_grad_()
    inputs = replace(INPUTS, behavior_logprobs=t(golden.LOGPROBS))
    losses, metrics = token_losses(Component("main", loss, 1.0), logprobs, inputs)
    weights = 1 / t(golden.LENGTHS) if isinstance(loss, Gmpo) else torch.ones(5)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logprobs)
    assert gradient.tolist() == same((-t(golden.ADVANTAGES) * weights).tolist())
    assert float(metrics["actor/ppo_kl"].abs().max()) == 0.0
    assert metrics["rollout_corr/ratio"].tolist() == [1.0] * 5
    if "actor/pg_clipfrac" in metrics:
        assert not metrics["actor/pg_clipfrac"].any()


SMOOTH = (ImportanceSampling, Ppo, Gspo, Sapo, Gmpo, Dro)
"""Losses of which nothing but a clip is constant."""


@pytest.mark.parametrize("loss", [each for each in POLICY_LOSSES if isinstance(each, SMOOTH)], ids=name_of)
def test_gradients_are_those_of_finite_differences(loss: Loss) -> None:
    logprobs = t(golden.LOGPROBS).requires_grad_()
    component = Component("main", loss, 1.0)
    (gradient,) = torch.autograd.grad(token_losses(component, logprobs, INPUTS)[0].sum(), logprobs)
    step = 1e-6
    for index in range(5):
        moved = [[lp + s * (at == index) for at, lp in enumerate(golden.LOGPROBS)] for s in (step, -step)]
        up, down = (float(losses_of(loss, logprobs=each)[0].sum()) for each in moved)
        assert float(gradient[index]) == pytest.approx((up - down) / (2 * step), abs=1e-7), index


ALL_LOSSES: list[Loss] = [*POLICY_LOSSES, CrossEntropy(), Kl(), Distillation(), Entropy(), Value()]


@pytest.mark.parametrize("loss", ALL_LOSSES, ids=name_of)
def test_weights_multiply_every_loss(loss: Loss) -> None:
    full = replace(INPUTS, entropy=t([1.0] * 5), values=t([0.5] * 5), returns=t([1.0] * 5))
    weights = t([2.0, -1.0, 0.0, 0.5, 0.25])
    plain, metrics = losses_of(loss, full)
    weighted, same_metrics = losses_of(loss, replace(full, weights=weights))
    assert weighted.tolist() == same((plain * weights).tolist())
    for name, values in metrics.items():
        assert torch.equal(values, same_metrics[name]), name


def test_a_weight_of_zero_silences_an_infinite_loss() -> None:
    """B16: 0 times infinity is nothing."""
    inputs = replace(INPUTS, weights=t([0.0, 1.0, 1.0, 1.0, 1.0]))
    logprobs = t([-math.inf, *golden.LOGPROBS[1:]]).requires_grad_()
    losses, _ = token_losses(Component("main", CrossEntropy(), 1.0), logprobs, inputs)
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.isfinite().all()
    assert gradient.tolist() == [0.0, -1.0, -1.0, -1.0, -1.0]


def test_n1_token_mean_is_not_a_mean_of_means() -> None:
    """B02, B03, B05: micro-batches (or ranks) with losses 1, 1, 1 and 5."""
    parts = [[-1.0, -1.0, -1.0], [-5.0]]
    sums = [
        float(
            losses_of(CrossEntropy(), TokenInputs(torch.zeros(len(p), dtype=torch.int64)), logprobs=p)[
                0
            ].sum()
        )
        for p in parts
    ]
    assert sum(sums) / 4 == golden.N1_TOKEN_MEAN
    assert sum(sums) / 4 != golden.N1_MEAN_OF_MEANS
    ppo = losses_of(Ppo(0.2, 0.28, 3.0))[0]
    assert float(ppo[:3].mean() + ppo[3:].mean()) / 2 == same(golden.L1_AGGREGATED["seq_mean_token_mean"])
    assert float(ppo.sum()) / 5 == same(golden.L1_AGGREGATED["token_mean"])


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    """B17: an option that is accepted must act."""
    one = TokenInputs(torch.tensor([0]), behavior_logprobs=t([-math.log(5)]), advantages=t([-1.0]))
    plain, _ = losses_of(Ppo(), one, logprobs=[0.0])
    dual, metrics = losses_of(Ppo(dual_clip=3.0), one, logprobs=[0.0])
    assert plain.item() == same(5.0)
    assert dual.item() == same(3.0)
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [True]


DEFAULTS_AND_CHANGES: list[tuple[Loss, list[Loss]]] = [
    (Ppo(), [Ppo(0.1, 0.2), Ppo(0.2, 0.1), Ppo(0.2, 0.2, 1.05)]),
    (Gspo(), [Gspo(0.1, 4e-4), Gspo(3e-4, 0.05)]),
    (Cispo(), [Cispo(0.9, 1.28), Cispo(0.8, 1.3)]),
    (Sapo(), [Sapo(1.1, 1.05), Sapo(1.0, 1.2)]),
    (Gmpo(0.3, 0.3), [Gmpo(0.2, 0.3), Gmpo(0.3, 0.2)]),
    (DppoTv(), [DppoTv(0.3, 0.15), DppoTv(0.15, 0.3), DppoTv(ratio_max=1.1)]),
    (Dro(), [Dro(0.2)]),
    (Kl(), [Kl(KlEstimator.K1), Kl(KlEstimator.K2), Kl(importance_weighted=True)]),
    (Distillation(), [Distillation(KlEstimator.K1), Distillation(importance_weighted=True)]),
    (Value(), [Value(0.1)]),
    (PrimeRl(), [PrimeRl(mask_low=0.6), PrimeRl(mask_high=0.1), PrimeRl(kl_tau=0.1)]),
    (ReinforceIs(), [ReinforceIs(ratio_min=0.7), ReinforceIs(ratio_max=1.2)]),
    (Art(), [Art(epsilon=0.2), Art(epsilon_high=0.2)]),
    (Vespo(), [Vespo(k_positive=1.0), Vespo(lambda_positive=1.0)]),
    (Vespo(), [Vespo(k_negative=1.0), Vespo(lambda_negative=1.0)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("default", "changed"),
    [(default, changed) for default, changes in DEFAULTS_AND_CHANGES for changed in changes],
    ids=repr,
)
def test_every_option_changes_something(default: Loss, changed: Loss) -> None:
    """B17, for the whole kind."""
    # A short first sequence, so that a sequence's ratio lies below 1 too, with A < 0.
    inputs = replace(
        INPUTS,
        behavior_logprobs=t([-1.2, -0.9, -1.6, -0.7, -0.7]),
        returns=t([1.0] * 5),
        values=t([0.5, 0.0, 0.2, 0.9, 0.1]),
        old_values=t([0.2] * 5),
    )
    first, second = losses_of(default, inputs)[0], losses_of(changed, inputs)[0]
    assert not torch.equal(first, second)
