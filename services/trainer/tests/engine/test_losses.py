"""Per-token losses against the float64 reference values, and each option's effect."""

import math

import pytest
import torch

from opentinker_trainer.domain.losses import CrossEntropy, ImportanceSampling, Ppo
from opentinker_trainer.engine.losses import TokenInputs, token_losses

# L0 of the reference: two rows of three tokens, the last one masked.
LOGPROBS = [-1.0, -0.5, -2.0, -0.2, -1.5]
OLD = [-1.2, -0.9, -1.6, -0.7, -1.0]
ADVANTAGES = [1.0, 1.0, 1.0, -0.5, -0.5]
L1 = [-1.22140275816, -1.28, -0.670320046036, 0.82436063535, 0.4]
L1_SUM = -1.947362168846
L8_SUM = -2.255921536631


def t(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs() -> TokenInputs:
    return TokenInputs(t(OLD), t(ADVANTAGES), None)


def test_ppo_matches_the_reference() -> None:
    losses, metrics = token_losses(Ppo(0.2, 0.28, 3.0), t(LOGPROBS), inputs())
    assert losses.tolist() == pytest.approx(L1, abs=1e-10)
    assert float(losses.sum()) == pytest.approx(L1_SUM, abs=1e-10)
    # Tokens 1 (ratio 1.49) and 4 (0.61, A < 0) are clipped.
    assert metrics["actor/pg_clipfrac"] == (2.0, 5.0)
    assert metrics["actor/ppo_kl"][0] == pytest.approx(sum(OLD) - sum(LOGPROBS))


def test_importance_sampling_matches_the_reference() -> None:
    losses, _ = token_losses(ImportanceSampling(), t(LOGPROBS), inputs())
    assert float(losses.sum()) == pytest.approx(L8_SUM, abs=1e-10)


def test_k3_matches_the_reference() -> None:
    # O8 of the reference: r = exp(old - rollout).
    rollout = [-1.1, -1.4, -1.6, -0.7, -0.3]
    _, metrics = token_losses(ImportanceSampling(), t(OLD), TokenInputs(t(rollout), t(ADVANTAGES), None))
    total, count = metrics["rollout_corr/k3"]
    assert total / count == pytest.approx(0.070028798505, abs=1e-10)
    squared, _ = metrics["rollout_corr/ratio_squared"]
    assert squared / count - 1 == pytest.approx(0.156721909096, abs=1e-10)


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    """B17: an option that is accepted must act."""
    one = TokenInputs(t([-math.log(5)]), t([-1.0]), None)
    plain, _ = token_losses(Ppo(), t([0.0]), one)
    dual, metrics = token_losses(Ppo(dual_clip=3.0), t([0.0]), one)
    assert plain.item() == pytest.approx(5.0)
    assert dual.item() == pytest.approx(3.0)
    assert metrics["actor/pg_clipfrac_lower"] == (1.0, 1.0)


@pytest.mark.parametrize("changed", [Ppo(0.1, 0.2), Ppo(0.2, 0.1), Ppo(0.2, 0.2, 1.05)])
def test_every_ppo_option_changes_something(changed: Ppo) -> None:
    default, _ = token_losses(Ppo(), t(LOGPROBS), inputs())
    other, _ = token_losses(changed, t(LOGPROBS), inputs())
    assert not torch.equal(default, other)


def test_cross_entropy_takes_weights_of_any_sign() -> None:
    weights = [1.0, -2.0, 0.0, 0.5, 1.0]
    losses, _ = token_losses(CrossEntropy(), t(LOGPROBS), TokenInputs(None, None, t(weights)))
    assert losses.tolist() == pytest.approx([-w * lp for w, lp in zip(weights, LOGPROBS, strict=True)])
    unweighted, _ = token_losses(CrossEntropy(), t(LOGPROBS), TokenInputs(None, None, None))
    assert unweighted.tolist() == pytest.approx([-lp for lp in LOGPROBS])


def test_ratio_is_one_on_the_first_minibatch() -> None:
    """B56: with the trainer's own logprobs nothing is clipped and nothing has drifted."""
    _, metrics = token_losses(Ppo(), t(LOGPROBS), TokenInputs(t(LOGPROBS), t(ADVANTAGES), None))
    assert metrics["actor/ppo_kl"][0] == 0.0
    assert metrics["actor/pg_clipfrac"][0] == 0.0
    assert metrics["rollout_corr/ratio"] == (5.0, 5.0)
