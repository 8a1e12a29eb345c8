"""Losses as the client states them: every option reaches the wire, what is malformed is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import rows_of

import opentinker as ot
from opentinker import errors
from opentinker.training.losses import components
from opentinker.training.samples import TrainSample, check
from opentinkerapi.data.v1 import loss_pb2
from opentinkerapi.runtime.tensors import unpack_floats

ROW = TrainSample(
    [1, 2, 3, 4],
    [0, 0, 1, 1],
    logprobs=[0, 0, -1, -1],
    advantages=[0, 0, 1, 1],
    weights=[1, 1, 2, -2],
    proximal_logprobs=[0, 0, -1.5, -1],
    reference_logprobs=[0, 0, -2, -1],
    teacher_logprobs=[0, 0, -3, -1],
    returns=[0, 0, 1, 0.5],
    old_values=[0, 0, 0.25, 0.5],
)
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "importance_sampling": (ot.ImportanceSampling(), {}),
    "ppo": (ot.PPO(0.1, 0.3, 2.0), {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 2.0}),
    "gspo": (ot.GSPO(1e-3, 2e-3), {"clip_low": 1e-3, "clip_high": 2e-3}),
    "cispo": (ot.CISPO(0.5, 2.0), {"ratio_min": 0.5, "ratio_max": 2.0}),
    "sapo": (ot.SAPO(2.0, 3.0), {"tau_positive": 2.0, "tau_negative": 3.0}),
    "gmpo": (ot.GMPO(0.1, 0.2), {"clip_low": 0.1, "clip_high": 0.2}),
    "dppo_tv": (ot.DPPO(0.1, 0.2, 5.0), {"delta_low": 0.1, "delta_high": 0.2, "ratio_max": 5.0}),
    "dro": (ot.DRO(0.7), {"beta": 0.7}),
    "cross_entropy": (ot.CrossEntropy(), {}),
    "kl": (ot.KL("k2", True), {"estimator": loss_pb2.KL_ESTIMATOR_K2, "importance_weighted": True}),
    "entropy": (ot.Entropy(), {}),
    "value": (ot.Value(0.3), {"clip": 0.3}),
    "distillation": (
        ot.Distillation("k1", True),
        {"estimator": loss_pb2.KL_ESTIMATOR_K1, "importance_weighted": True},
    ),
    "registered": (ot.Registered("mine", {"x": 2}), {"loss": "mine", "options": {"x": 2.0}}),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_every_option_reaches_the_wire(kind: str) -> None:
    """B17: an option that is accepted and never passed on."""
    loss, options = LOSSES[kind]
    (wire,) = components(loss, 3.0)
    assert wire.WhichOneof("loss") == kind
    inner = getattr(wire, kind)
    fields = {field.name for field in inner.DESCRIPTOR.fields}
    assert fields == set(options), "an option of the loss that the client cannot set, or this test does not"
    for name, value in options.items():
        sent = getattr(inner, name)
        assert (dict(sent) if isinstance(value, dict) else sent) == value
    assert (wire.name, wire.denominator) == (loss.component, 3.0)


@pytest.mark.parametrize(
    ("correction", "kind", "bounds"),
    [
        (ot.TIS(1.5), "TOKEN_TRUNCATE", {"high": 1.5}),
        (ot.IcePop(0.4, 1.6), "TOKEN_MASK", {"low": 0.4, "high": 1.6}),
        (ot.SequenceTruncate(1.5), "SEQUENCE_TRUNCATE", {"high": 1.5}),
        (ot.SequenceMask(0.1, 1.4), "SEQUENCE_MASK", {"low": 0.1, "high": 1.4}),
        (ot.GeometricMask(0.9, 1.1, 3.0), "GEOMETRIC_MASK", {"low": 0.9, "high": 1.1, "token_high": 3.0}),
        (ot.Decoupled(), "NONE", {}),
    ],
)
def test_corrections(correction: Any, kind: str, bounds: dict[str, float]) -> None:
    for loss, _ in LOSSES.values():
        if hasattr(loss, "correction"):
            corrected = replace(loss, correction=correction)
            (wire,) = components(corrected, 1.0)
            assert loss_pb2.CorrectionKind.Name(wire.correction.kind) == f"CORRECTION_KIND_{kind}"
            assert {field.name: value for field, value in wire.correction.ListFields()} == {
                "kind": wire.correction.kind,
                **bounds,
            }
            assert "proximal_logprobs" in corrected.needs
    with pytest.raises(errors.InvalidSample, match=r"sample 0: proximal_logprobs is missing; 'policy'"):
        check([replace(ROW, proximal_logprobs=None)], {"policy": ot.PPO(correction=correction).needs})


def test_terms_have_coefficients_and_denominators_of_their_own(doubles: World) -> None:
    """Policy, supervised and distillation rows in one call; rows say what applies to them."""
    policy = doubles.cluster.create_policy("tiny").result()
    rows = [
        replace(ROW, components=["policy", "kl"]),
        replace(ROW, components=["labels"], logprobs=None, advantages=None),
        replace(ROW, components=["teacher"], loss_mask=[0, 0, 0, 1]),
    ]
    losses = {
        "policy": ot.PPO(correction=ot.TIS()),
        "kl": ot.Component(ot.KL(), coefficient=0.1, denominator=7.0),
        "labels": ot.CrossEntropy(),
        "teacher": ot.Component(ot.Distillation(), coefficient=-0.5),
    }
    policy.forward_backward(rows, losses, denominator={"policy": 2.0})
    policy.optim_step(ot.AdamW()).result()
    (_, _, (start, *chunks)), (_, _, (step,)) = doubles.trainer.ran
    sent = {term.name: term for term in start.losses}
    assert (sent["policy"].denominator, sent["kl"].denominator) == (2.0, 7.0)
    assert sent["kl"].coefficient == 0.1
    assert sent["teacher"].coefficient == -0.5
    assert not sent["policy"].HasField("coefficient")
    # Deferred ones are divided by the loss tokens of the rows they apply to.
    assert {part.component: part.denominator for part in step.denominators} == {"labels": 2.0, "teacher": 1.0}
    sample = rows_of([start, *chunks])[0]
    assert list(sample.components) == ["policy", "kl"]
    for name in (
        "behavior_logprobs",
        "advantages",
        "weights",
        "proximal_logprobs",
        "reference_logprobs",
        "teacher_logprobs",
        "returns",
        "old_values",
    ):
        own = getattr(ROW, name.removeprefix("behavior_"))
        assert unpack_floats(getattr(sample, name)).tolist() == own, name


@pytest.mark.parametrize(
    ("array", "loss"),
    [
        ("logprobs", ot.GSPO()),
        ("advantages", ot.CISPO()),
        ("reference_logprobs", ot.KL()),
        ("logprobs", ot.KL(importance_weighted=True)),
        ("teacher_logprobs", ot.Distillation()),
        ("returns", ot.Value()),
        ("old_values", ot.Value(clip=0.2)),
    ],
)
def test_rows_without_what_a_loss_needs_are_refused_by_index(array: str, loss: Any) -> None:
    rows = [ROW, replace(ROW, **{array: None})]
    with pytest.raises(errors.InvalidSample, match=f"sample 1: {array} is missing") as caught:
        check(rows, {loss.component: loss.needs})
    assert caught.value.field == "samples[1]"
    # Rows that the component does not apply to need nothing for it.
    check([ROW, replace(rows[1], components=["other"])], {loss.component: loss.needs, "other": ()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"loss_mask": [0, 1]}, "2 entries for 4"),
        ({"loss_mask": [0, 0, 2, 1]}, "0 or 1"),
        ({"loss_mask": [1, 0, 1, 1]}, r"loss_mask\[0\]"),
        ({"returns": [0, 0, 1]}, "returns has 3 entries for 4"),
        ({"teacher_logprobs": [[0, 0, 1, 1]]}, "teacher_logprobs has 1x4"),
        ({"old_values": [0, 0, float("nan"), 1]}, "old_values is not finite"),
        ({"proximal_logprobs": [0, 0, -float("inf"), 1]}, "proximal_logprobs is not finite"),
        ({"components": ["what"]}, r"\['what'\] are none of \['policy'\]"),
    ],
)
def test_malformed_rows_are_refused_by_index(change: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidSample, match=f"sample 1: .*{said}"):
        check([ROW, replace(ROW, **change)], {"policy": ot.PPO().needs})


def test_what_is_not_finite_behind_the_mask_is_nobodys_business() -> None:
    """B16: -inf at tokens that are not trained on."""
    check([replace(ROW, logprobs=[-float("inf"), float("nan"), -1, -1])], {"policy": ot.PPO().needs})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ot.GSPO(clip_low=1), "clip_low"),
        (lambda: ot.CISPO(2, 1), "ratio_min"),
        (lambda: ot.SAPO(tau_positive=0), "tau_positive"),
        (lambda: ot.GMPO(clip_high=-1), "clip_high"),
        (lambda: ot.DPPO(delta_low=-1), "delta_low"),
        (lambda: ot.DRO(float("inf")), "beta"),
        (lambda: ot.KL("k4"), "k1, k2, k3, k3_straight_through"),
        (lambda: ot.Value(clip=0), "clip"),
        (lambda: ot.Registered(""), "name"),
        (lambda: ot.TIS(0), "high"),
        (lambda: ot.IcePop(2, 1), "low"),
        (lambda: ot.PPO(correction=2.0), "correction: 2.0 is none of TIS"),
        (lambda: ot.Component("ppo"), "none of"),
        (lambda: ot.Component(ot.PPO(), coefficient=float("nan")), "coefficient"),
        (lambda: ot.Component(ot.PPO(), denominator=0), "denominator"),
        (lambda: components(ot.PPO(), -1.0), "denominator"),
        (lambda: components({"a": ot.PPO()}, {"b": 1.0}), r"\['b'\] name no component"),
    ],
)
def test_bad_options_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        make()
