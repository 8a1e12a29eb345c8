"""The numpy oracle of every loss against the reference values."""

from typing import Any

import numpy as np
import pytest
from client.tests.training.golden import CASES

from opentinker import errors
from opentinker.training import off_policy
from opentinker.training import reference_losses as losses
from opentinker.training.aggregation import Mode, aggregate

INPUTS = {name: [np.array(row) for row in rows] for name, rows in CASES["L0_inputs"].items()}
MASKS = CASES["L0_inputs"]["mask"]
ROWS = list(zip(INPUTS["lp"], INPUTS["old"], INPUTS["adv"], strict=True))
WITH_MASK = [(*row, mask) for row, mask in zip(ROWS, MASKS, strict=True)]
PPO = [losses.ppo(*row, clip_low=0.2, clip_high=0.28, dual_clip=3.0) for row in ROWS]


def close(ours: Any, golden: Any) -> None:
    np.testing.assert_allclose(ours, golden, rtol=0, atol=1e-9)


def total(mode: Mode, rows: Any) -> float:
    return aggregate(mode, MASKS).total(rows, MASKS)


def test_ppo() -> None:
    """L1, L1c; B17: a dual clip that is given acts."""
    close(PPO, CASES["L1"]["out"])
    far = (np.log(5.0), 0.0, -1.0)
    close(losses.ppo(*far), CASES["L1c"]["no_dual"])
    close(losses.ppo(*far, dual_clip=3.0), CASES["L1c"]["dual_c3"])
    close(losses.ppo(np.log(5.0), 0.0, 1.0, clip_high=0.28, dual_clip=3.0), -1.28)


def test_gspo() -> None:
    """L2."""
    rows = [losses.gspo(*row, clip_low=3e-4, clip_high=4e-4) for row in WITH_MASK]
    close(total("seq_mean_token_mean", rows), CASES["L2"]["loss_seq_mean_token_mean"])
    ratios = [off_policy.geometric_ratio(now, old, mask) for now, old, _, mask in WITH_MASK]
    close(ratios, CASES["L2"]["seq_ratio"])
    wide = [losses.gspo(*row, clip_low=0.5, clip_high=0.5) for row in WITH_MASK]
    close(wide[0], -CASES["L2"]["seq_ratio"][0] * np.ones(3))


def test_cispo() -> None:
    """L3: two conventions for the upper bound; L9 takes its ratio to the sampler."""
    narrow, trl = CASES["L3"].values()
    close(total("token_mean", [losses.cispo(*row) for row in ROWS]), narrow)
    close(total("token_mean", [losses.cispo(*row, ratio_min=0.0, ratio_max=5.0) for row in ROWS]), trl)
    to_sampler = [
        losses.cispo(now, sampler, gain, ratio_min=0.1, ratio_max=10.0)
        for now, sampler, gain in zip(INPUTS["lp"], INPUTS["rollout"], INPUTS["adv"], strict=True)
    ]
    close(total("token_mean", to_sampler), CASES["L9"]["out"])


def test_sapo() -> None:
    """L4."""
    rows = [losses.sapo(*row, tau_positive=1.0, tau_negative=1.05) for row in ROWS]
    close(total("seq_mean_token_mean", rows), CASES["L4"]["seq-mean-token-mean"])
    close(total("token_mean", rows), CASES["L4"]["token-mean"])


def test_gmpo() -> None:
    """L5."""
    rows = [losses.gmpo(*row, clip_low=0.4, clip_high=0.4) for row in WITH_MASK]
    close(total("seq_mean_token_mean", rows), CASES["L5"]["out"])


def test_dppo_tv() -> None:
    """L6."""
    rows = [losses.dppo_tv(*row, delta_low=0.15, delta_high=0.15, ratio_max=20.0) for row in ROWS]
    close(rows, CASES["L6"]["per_token"])
    close(total("token_mean", rows), CASES["L6"]["out"])
    close(losses.dppo_tv(-0.1, -3.0, 1.0, delta_high=0.9, ratio_max=2.0), 0.2)


def test_importance_sampling_dro_and_cross_entropy() -> None:
    """L8, L10."""
    close(total("token_sum", [losses.importance_sampling(*row) for row in ROWS]), CASES["L8"]["out"])
    close(total("token_mean", [losses.dro(*row, beta=0.1) for row in ROWS]), CASES["L10"]["out"])
    close(losses.cross_entropy([-1.0, -2.0], [0.5, -3.0]), [0.5, -6.0])
    close(losses.cross_entropy([-1.0, -2.0]), [1.0, 2.0])


def test_value() -> None:
    """L13."""
    now, before, target = [0.5, 0.9], [0.4, 0.4], [1.0, 0.0]
    close(losses.value(now, target, before, clip=0.2).mean(), CASES["L13"]["out"])
    close(losses.value([0.9], [1.0], [0.4], clip=0.2), [0.08])  # clipped to 0.6, which is worse
    close(losses.value([0.9], [1.0]), [0.005])
    with pytest.raises(TypeError, match="old_values"):
        losses.value(now, target, clip=0.2)


def test_corrected_losses_keep_their_denominator() -> None:
    """O6, O10."""
    weights = off_policy.token_ratio(INPUTS["old"], INPUTS["rollout"])
    truncated = [loss * weight for loss, weight in zip(PPO, off_policy.truncate(weights, 1.5), strict=True)]
    close(total("token_mean", truncated), CASES["O6"]["out"])
    filtered = off_policy.mask_outside(weights, 0.0, 1.5)
    decoupled = [losses.ppo(*row) * weight for row, weight in zip(ROWS, filtered, strict=True)]
    close(total("token_mean", decoupled), CASES["O10"]["out"])


def test_what_stands_at_masked_tokens_does_not_matter() -> None:
    """B16: -inf there must not leak by way of nan * 0."""
    for fill in (-np.inf, np.nan, 1e6):
        sums = []
        for value in (0.0, fill):
            lp, old = INPUTS["lp"][1].copy(), INPUTS["old"][1].copy()
            lp[2], old[2] = value, 0.0
            gain, mask = INPUTS["adv"][1], MASKS[1]
            with np.errstate(all="ignore"):
                rows = [
                    losses.ppo(lp, old, gain),
                    losses.gspo(lp, old, gain, mask),
                    losses.cispo(lp, old, gain),
                    losses.sapo(lp, old, gain),
                    losses.gmpo(lp, old, gain, mask),
                    losses.dppo_tv(lp, old, gain),
                    losses.dro(lp, old, gain),
                ]
            sums.append([aggregate("token_mean", [mask]).total([row], [mask]) for row in rows])
        np.testing.assert_array_equal(sums[1], sums[0])


def test_a_ratio_of_one_is_where_every_loss_is_its_policy_gradient() -> None:
    """B56, for the formulas: at logprob = old the slope of each loss is -A (finite differences)."""
    step, old, mask = 1e-6, np.array([-0.7, -2.0]), [1, 1]
    for gain in (1.5, -0.5):
        gains = np.full(2, gain)

        def slope(loss: Any, gains: Any = gains, **options: Any) -> Any:
            up, down = loss(old + step, old, gains, **options), loss(old - step, old, gains, **options)
            return (up - down) / (2 * step)

        for loss in (losses.importance_sampling, losses.ppo, losses.sapo, losses.dro):
            options = {"tau_positive": 1.0, "tau_negative": 1.0} if loss is losses.sapo else {}
            np.testing.assert_allclose(slope(loss, **options), -gains, rtol=1e-4)
        for loss in (losses.gspo, losses.gmpo):
            np.testing.assert_allclose(slope(loss, mask=mask), -gains, rtol=1e-4)


def test_options_are_checked() -> None:
    row = ROWS[0]
    for call, name in (
        (lambda: losses.ppo(*row, clip_low=1.0), "clip_low"),
        (lambda: losses.ppo(*row, dual_clip=1.0), "dual_clip"),
        (lambda: losses.gspo(*WITH_MASK[0], clip_high=-1.0), "clip_high"),
        (lambda: losses.cispo(*row, ratio_min=2.0, ratio_max=1.0), "ratio_min"),
        (lambda: losses.sapo(*row, tau_negative=0.0), "tau_negative"),
        (lambda: losses.gmpo(*WITH_MASK[0], clip_low=-0.1), "clip_low"),
        (lambda: losses.dppo_tv(*row, ratio_max=0.0), "ratio_max"),
        (lambda: losses.dro(*row, beta=-1.0), "beta"),
        (lambda: losses.value([0.0], [0.0], [0.0], clip=0.0), "clip"),
    ):
        with pytest.raises(errors.InvalidArgument, match=name):
            call()
