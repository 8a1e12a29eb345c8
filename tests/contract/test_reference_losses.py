"""The trainer's losses are those of the client's numpy oracle, under the client's names of options."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import opentinker as ot
from opentinker import kl, off_policy, reference_losses
from opentinker.training.losses import components
from opentinker_trainer.engine.losses import token_losses
from opentinker_trainer.engine.token_inputs import TokenInputs
from opentinker_trainer.wire_losses import components_of

EXACT = {"rtol": 1e-11, "atol": 1e-12}
Oracle = Callable[..., Any]

ORACLES: dict[type, tuple[Oracle, bool]] = {
    ot.ImportanceSampling: (reference_losses.importance_sampling, False),
    ot.PPO: (reference_losses.ppo, False),
    ot.GSPO: (reference_losses.gspo, True),
    ot.CISPO: (reference_losses.cispo, False),
    ot.SAPO: (reference_losses.sapo, False),
    ot.GMPO: (reference_losses.gmpo, True),
    ot.DPPO: (reference_losses.dppo_tv, False),
    ot.DRO: (reference_losses.dro, False),
}
"""The oracle of each policy loss, and whether it needs the mask of its sequence."""

LOSSES = [
    *(kind() for kind in ORACLES),
    ot.PPO(clip_low=0.1, clip_high=0.28, dual_clip=3.0),
    ot.GSPO(clip_low=0.1, clip_high=0.2),
    ot.CISPO(ratio_min=0.0, ratio_max=5.0),
    ot.SAPO(tau_positive=0.5, tau_negative=2.0),
    ot.GMPO(clip_low=0.1, clip_high=0.3),
    ot.DPPO(delta_low=0.05, delta_high=0.3, ratio_max=1.5),
    ot.DRO(beta=2.0),
]


class Rows:
    """Random ragged sequences, some logprobs far apart, advantages of both signs and 0."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        sizes = generator.integers(1, 9, size=7)
        self.behavior = [-generator.exponential(2.0, size) for size in sizes]
        scales = generator.choice([0.01, 0.3, 30.0], size=len(sizes), p=[0.4, 0.4, 0.2])
        self.proximal = [
            b + s * generator.normal(size=len(b)) for b, s in zip(self.behavior, scales, strict=True)
        ]
        self.logprobs = [p + 0.3 * generator.normal(size=len(p)) for p in self.proximal]
        self.reference = [p + generator.normal(size=len(p)) for p in self.proximal]
        self.advantages = [generator.choice([-1.5, -0.2, 0.0, 0.7, 2.0], size=size) for size in sizes]
        self.returns = [generator.normal(size=size) for size in sizes]
        self.old_values = [generator.normal(size=size) for size in sizes]
        self.values = [v + 0.3 * generator.normal(size=len(v)) for v in self.old_values]
        self.weights = [generator.normal(size=size) for size in sizes]

    def inputs(self, **changes: Any) -> TokenInputs:
        numbers = [np.full(len(row), index) for index, row in enumerate(self.logprobs)]
        given = {
            "behavior_logprobs": flat(self.behavior),
            "proximal_logprobs": flat(self.proximal),
            "advantages": flat(self.advantages),
            "reference_logprobs": flat(self.reference),
            "teacher_logprobs": flat(self.reference),
            "returns": flat(self.returns),
            "old_values": flat(self.old_values),
            "values": flat(self.values),
        }
        return TokenInputs(sequences=torch.tensor(np.concatenate(numbers)), **{**given, **changes})


def flat(rows: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(np.concatenate(rows), dtype=torch.float64)


def of_trainer(loss: Any, rows: Rows, **changes: Any) -> np.ndarray[Any, Any]:
    (component,) = components_of(components({"it": ot.Component(loss, 1.0, 1.0)}, None))
    losses, _ = token_losses(component, flat(rows.logprobs), rows.inputs(**changes))
    return losses.numpy()


def of_oracle(loss: Any, rows: Rows, old: Sequence[Any]) -> list[Any]:
    oracle, by_sequence = ORACLES[type(loss)]
    options = {each.name: getattr(loss, each.name) for each in fields(loss) if each.name != "correction"}
    return [
        oracle(now, then, gain, *([np.ones(len(now), dtype=int)] if by_sequence else []), **options)
        for now, then, gain in zip(rows.logprobs, old, rows.advantages, strict=True)
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_policy_losses(loss: Any, seed: int) -> None:
    rows = Rows(seed)
    np.testing.assert_allclose(
        of_trainer(loss, rows), np.concatenate(of_oracle(loss, rows, rows.proximal)), **EXACT
    )
    to_sampler = of_trainer(loss, rows, proximal_logprobs=None)
    np.testing.assert_allclose(to_sampler, np.concatenate(of_oracle(loss, rows, rows.behavior)), **EXACT)


def ones(row: Any) -> np.ndarray[Any, Any]:
    return np.ones(len(row), dtype=int)


CORRECTIONS: list[tuple[Any, Callable[[Any, Any], Any]]] = [
    (ot.Decoupled(), lambda p, b: off_policy.token_ratio(p, b)),
    (ot.TIS(1.5), lambda p, b: off_policy.truncate(off_policy.token_ratio(p, b), 1.5)),
    (ot.IcePop(0.5, 1.5), lambda p, b: off_policy.mask_outside(off_policy.token_ratio(p, b), 0.5, 1.5)),
    (
        ot.SequenceTruncate(1.2),
        lambda p, b: off_policy.truncate(np.full(len(p), off_policy.sequence_ratio(p, b, ones(p))), 1.2),
    ),
    (
        ot.SequenceMask(0.3, 1.4),
        lambda p, b: off_policy.mask_outside(
            np.full(len(p), off_policy.sequence_ratio(p, b, ones(p))), 0.3, 1.4
        ),
    ),
    (
        ot.GeometricMask(0.9, 1.1, token_high=1.05),
        lambda p, b: off_policy.geometric_mask(p, b, ones(p), low=0.9, high=1.1, token_high=1.05),
    ),
]


@pytest.mark.parametrize(("correction", "weights"), CORRECTIONS, ids=[repr(each[0]) for each in CORRECTIONS])
def test_corrections(correction: Any, weights: Callable[[Any, Any], Any]) -> None:
    rows = Rows(11)
    factors = [weights(p, b) for p, b in zip(rows.proximal, rows.behavior, strict=True)]
    assert len(set(np.concatenate(factors).tolist())) > 1
    expected = [
        factor * loss for factor, loss in zip(factors, of_oracle(ot.PPO(), rows, rows.proximal), strict=True)
    ]
    np.testing.assert_allclose(
        of_trainer(ot.PPO(correction=correction), rows), np.concatenate(expected), **EXACT
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_divergences_and_their_gradients(estimator: Any) -> None:
    rows = Rows(5)
    far = np.array([-30.0, -12.0, -2.7, 0.0, 11.0, 25.0])
    rows.logprobs[0] = far
    for name in ("behavior", "proximal", "reference", "advantages", "returns", "old_values", "values"):
        getattr(rows, name)[0] = np.zeros(len(far))
    expected = [
        kl.estimate(estimator, now, ref) for now, ref in zip(rows.logprobs, rows.reference, strict=True)
    ]
    np.testing.assert_allclose(of_trainer(ot.KL(estimator), rows), np.concatenate(expected), **EXACT)
    np.testing.assert_allclose(
        of_trainer(ot.Distillation(estimator), rows), np.concatenate(expected), **EXACT
    )
    weighted = [
        value * off_policy.token_ratio(now, then)
        for value, now, then in zip(expected, rows.logprobs, rows.behavior, strict=True)
    ]
    ours = of_trainer(ot.KL(estimator, importance_weighted=True), rows)
    np.testing.assert_allclose(ours, np.concatenate(weighted), **EXACT)

    (component,) = components_of(components({"it": ot.Component(ot.KL(estimator), 1.0, 1.0)}, None))
    logprobs = flat(rows.logprobs).requires_grad_()
    losses, _ = token_losses(component, logprobs, rows.inputs())
    (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
    wanted = [
        kl.gradient(estimator, now, ref) for now, ref in zip(rows.logprobs, rows.reference, strict=True)
    ]
    np.testing.assert_allclose(slopes.numpy(), np.concatenate(wanted), rtol=1e-6, atol=1e-9)


def test_values_and_weights() -> None:
    rows = Rows(9)
    for clip in (None, 0.2):
        expected = [
            reference_losses.value(now, target, before, clip=clip)
            for now, target, before in zip(rows.values, rows.returns, rows.old_values, strict=True)
        ]
        np.testing.assert_allclose(of_trainer(ot.Value(clip), rows), np.concatenate(expected), **EXACT)
    signed = of_trainer(ot.CrossEntropy(), rows, weights=flat(rows.weights))
    expected = [
        reference_losses.cross_entropy(*pair) for pair in zip(rows.logprobs, rows.weights, strict=True)
    ]
    np.testing.assert_allclose(signed, np.concatenate(expected), **EXACT)
