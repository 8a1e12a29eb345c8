"""KL estimates, their derivatives and clamps, and the ways they enter an objective."""

from typing import Any, get_args

import numpy as np
import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training import kl
from opentinker.training.aggregation import aggregate
from opentinker.training.off_policy import token_ratio

INPUTS = {name: [np.array(row) for row in rows] for name, rows in CASES["L0_inputs"].items()}
MASKS = CASES["L0_inputs"]["mask"]


def close(ours: Any, golden: Any) -> None:
    np.testing.assert_allclose(ours, golden, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("case", "d"), [("K1", 0.5), ("K1b", -0.5)])
def test_estimates(case: str, d: float) -> None:
    for estimator, value in CASES[case].items():
        close(kl.estimate(estimator, d, 0.0), value)
    close(kl.estimate("k3_straight_through", d, 0.0), CASES[case]["k3"])


def test_clamps() -> None:
    """K2: one impossible token does not weigh 1e13."""
    golden = CASES["K2"]
    ours = kl.estimate("k3", -30.0, 0.0)
    assert ours == golden["verl/SkyRL (in +-20, out +-10)"]
    unclamped = golden["slime k3 / TRL: unclamped"]
    assert ours < unclamped / 1e12
    np.testing.assert_allclose(
        kl.estimate("k3", -30.0, 0.0, input_clamp=None, output_clamp=None), unclamped, rtol=1e-12
    )
    assert kl.estimate("k1", -30.0, 0.0) == -20.0
    assert kl.estimate("k2", 30.0, 0.0) == 200.0


def test_token_means() -> None:
    """K3; K4: times the ratio to the sampler it is unbiased off policy."""
    plan = aggregate("token_mean", MASKS)
    k3 = kl.estimate("k3", INPUTS["lp"], INPUTS["ref"])
    close(plan.total(k3, MASKS), CASES["K3"]["out"])
    weighted = k3 * token_ratio(INPUTS["lp"], INPUTS["old"])
    close(plan.total(weighted, MASKS), CASES["K4"]["out"])


def test_the_adaptive_coefficient() -> None:
    """K5."""
    controller = kl.AdaptiveKL(0.2, target=6.0, horizon=10_000.0)
    close(controller.update(9.0, 256).coefficient, CASES["K5"]["out"])
    assert controller.update(6.0, 256) == controller
    assert controller.update(0.0, 256).coefficient < 0.2
    close(controller.update(1e9, 256).coefficient, controller.update(7.2, 256).coefficient)
    for options in ({"coefficient": 0.0}, {"target": -1.0}, {"horizon": 0.0}):
        with pytest.raises(errors.InvalidArgument, match=next(iter(options))):
            kl.AdaptiveKL(**{"coefficient": 0.2, "target": 6.0, **options})
    with pytest.raises(errors.InvalidArgument, match="kl"):
        controller.update(float("nan"), 256)


def test_derivatives() -> None:
    """K6; B15: every term has a gradient, and it is that of what it says."""
    golden = CASES["K6"]
    for estimator, key in (("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_straight_through", "k3plus")):
        close(kl.gradient(estimator, 0.5, 0.0), golden[key])  # type: ignore[arg-type]
    step, d = 1e-6, np.array([-2.0, -0.5, 0.3, 4.0, 9.0])
    for estimator in get_args(kl.Estimator):
        value = "k2" if estimator == "k3_straight_through" else estimator
        slope = (kl.estimate(value, d + step, 0.0) - kl.estimate(value, d - step, 0.0)) / (2 * step)
        np.testing.assert_allclose(kl.gradient(estimator, d, 0.0), slope, rtol=1e-6, atol=1e-8)


def test_a_clamp_does_not_let_go_of_the_farthest_tokens() -> None:
    """B15: a clamp of the value must not end the gradient."""
    for estimator in get_args(kl.Estimator):
        far = kl.gradient(estimator, np.array([-5.0, -30.0]), 0.0)
        assert (far == 1).all() if estimator == "k1" else (far < 0).all()
        assert np.isfinite(far).all()
    at_bound = kl.gradient("k3", -30.0, 0.0)
    np.testing.assert_allclose(at_bound, kl.gradient("k3", -5.0, 0.0))
    x = np.log1p(-at_bound)
    close(kl.estimate("k3", -x, 0.0, output_clamp=None), kl.OUTPUT_CLAMP)


def test_pulling_towards_the_reference_lowers_kl() -> None:
    """B24: the sign. Descent on each estimate of a drawn token, on a categorical policy, exactly."""
    reference = np.log(np.array([0.7, 0.2, 0.1]))
    for estimator in ("k2", "k3", "k3_straight_through"):
        logits = np.array([0.0, 1.0, 0.5])
        history = []
        for _ in range(50):
            logprobs = logits - np.log(np.exp(logits).sum())
            p = np.exp(logprobs)
            history.append(float((p * (logprobs - reference)).sum()))
            slopes = kl.gradient(estimator, logprobs, reference)  # type: ignore[arg-type]
            # d logprob_i / d logits_j = [i = j] - p_j, tokens drawn with p.
            logits = logits - 0.5 * (p * slopes - p * (p * slopes).sum())
        assert history[-1] < 0.2 * history[0]


def test_kl_in_the_reward_and_as_a_centred_advantage() -> None:
    divergences = [[np.nan, 1.0, 2.0], [3.0, 9.0]]
    masks = [[0, 1, 1], [1, 0]]
    shaped = kl.in_reward([[0.0, 0.0, 1.0], [1.0, 5.0]], divergences, masks, 0.1)
    np.testing.assert_allclose(shaped[0], [0.0, -0.1, 0.8])
    np.testing.assert_allclose(shaped[1], [0.7, 5.0])
    centred = kl.centred(divergences, masks)
    np.testing.assert_allclose(centred[0], [0.0, -1.0, 0.0])
    np.testing.assert_allclose(centred[1], [1.0, 0.0])
    assert kl.centred([[1.0]], [[0]])[0].tolist() == [0.0]
    with pytest.raises(errors.InvalidArgument, match="coefficient"):
        kl.in_reward([[0.0]], [[0.0]], [[1]], -1.0)
    with pytest.raises(errors.InvalidArgument, match="estimator"):
        kl.estimate("k4", 0.0, 0.0)  # type: ignore[arg-type]
