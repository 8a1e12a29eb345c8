"""What is refused in the losses and samples of a request, by index and field, and what is taken."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from services.trainer.tests.builders import sample

from opentinker_kit.errors import ServiceError
from opentinker_trainer import wire
from opentinker_trainer.domain.loss_checks import check_value_head
from opentinker_trainer.domain.losses import (
    LOSS_NAMES,
    TYPED_NAMES,
    Cispo,
    Component,
    Correction,
    CorrectionKind,
    CrossEntropy,
    Distillation,
    Dro,
    Entropy,
    Kl,
    KlEstimator,
    Ppo,
    Value,
)
from opentinker_trainer.domain.registered import PrimeRl, Vespo
from opentinker_trainer.domain.samples import ARRAYS, Limits, Sample, check_samples
from opentinkerapi.data.v1 import loss_pb2, train_sample_pb2
from opentinkerapi.runtime.reasons import Reason

LIMITS = Limits(vocab_size=256, max_sequence_tokens=64)


def message(**fields: Any) -> loss_pb2.LossComponent:
    return loss_pb2.LossComponent(**{"name": "main", "denominator": 2.0, **fields})


def one(**fields: Any) -> Component:
    (component,) = wire.components_of([message(**fields)])
    return component


def refused(call: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        call()
    return error.value


def field_of(error: ServiceError) -> str:
    assert error.field is not None
    return error.field


# Losses.


def test_every_typed_loss_is_read_with_its_defaults() -> None:
    (oneof,) = (each for each in loss_pb2.LossComponent.DESCRIPTOR.oneofs if each.name == "loss")
    assert {field.name for field in oneof.fields} == {*TYPED_NAMES, "registered"}
    for name in TYPED_NAMES:
        component = wire.components_of([_empty(name)])[0]
        assert component.loss == type(component.loss)(), name
        assert type(component.loss).__name__.lower() == name.replace("_", "")


def _empty(name: str) -> loss_pb2.LossComponent:
    wanted = message()
    getattr(wanted, name).SetInParent()
    return wanted


def test_every_option_of_every_loss_reaches_its_value() -> None:
    """B17: an option that is accepted is not lost on the way."""
    for name in TYPED_NAMES:
        for field in loss_pb2.LossComponent.DESCRIPTOR.fields_by_name[name].message_type.fields:
            wanted = _empty(name)
            value: Any = {field.CPPTYPE_BOOL: True, field.CPPTYPE_ENUM: loss_pb2.KL_ESTIMATOR_K2}.get(
                field.cpp_type, 1.125 if field.name in ("dual_clip", "ratio_max") else 0.75
            )
            setattr(getattr(wanted, name), field.name, value)
            loss = wire.components_of([wanted])[0].loss
            expected = KlEstimator.K2 if field.name == "estimator" else value
            assert getattr(loss, field.name) == expected, (name, field.name)
            assert loss != type(loss)(), (name, field.name)


def test_options_of_zero_are_not_taken_for_defaults() -> None:
    assert one(ppo=loss_pb2.PpoLoss(clip_low=0.0)).loss == Ppo(clip_low=0.0)
    assert one(cispo=loss_pb2.CispoLoss(ratio_min=0.0)).loss == Cispo(ratio_min=0.0)
    assert one(dro=loss_pb2.DroLoss(beta=0.0)).loss == Dro(beta=0.0)
    assert one(cross_entropy=loss_pb2.CrossEntropyLoss(), coefficient=0.0).coefficient == 0.0


def test_divergences_have_their_own_default_estimators() -> None:
    assert one(kl=loss_pb2.KlLoss()).loss == Kl(KlEstimator.K3)
    distillation = one(distillation=loss_pb2.DistillationLoss(importance_weighted=True)).loss
    assert distillation == Distillation(KlEstimator.K3_STRAIGHT_THROUGH, importance_weighted=True)


def test_corrections_are_read() -> None:
    kinds = loss_pb2.CorrectionKind
    mask = loss_pb2.OffPolicyCorrection(kind=kinds.CORRECTION_KIND_TOKEN_MASK, low=0.5, high=2.0)
    component = one(ppo=loss_pb2.PpoLoss(), correction=mask)
    assert component.correction == Correction(CorrectionKind.TOKEN_MASK, 0.5, 2.0)
    assert component.needs == ("behavior_logprobs", "advantages", "proximal_logprobs")
    assert len(kinds.keys()) == len(CorrectionKind) + 1
    assert one(ppo=loss_pb2.PpoLoss()).needs == ("behavior_logprobs", "advantages")


def correction(kind: str, **bounds: float) -> dict[str, Any]:
    value = loss_pb2.OffPolicyCorrection(kind=getattr(loss_pb2, f"CORRECTION_KIND_{kind}"), **bounds)
    return {"ppo": loss_pb2.PpoLoss(), "correction": value}


def registered(loss: str, **options: float) -> dict[str, Any]:
    return {"registered": loss_pb2.RegisteredLoss(loss=loss, options=options)}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("ppo.clip_low", {"ppo": loss_pb2.PpoLoss(clip_low=1.0)}),
        ("ppo.clip_high", {"ppo": loss_pb2.PpoLoss(clip_high=INF)}),
        ("ppo.dual_clip", {"ppo": loss_pb2.PpoLoss(dual_clip=1.0)}),
        ("gspo.clip_low", {"gspo": loss_pb2.GspoLoss(clip_low=-0.1)}),
        ("gspo.clip_high", {"gspo": loss_pb2.GspoLoss(clip_high=NAN)}),
        ("cispo.ratio_min", {"cispo": loss_pb2.CispoLoss(ratio_min=2.0)}),
        ("cispo.ratio_max", {"cispo": loss_pb2.CispoLoss(ratio_max=INF)}),
        ("sapo.tau_positive", {"sapo": loss_pb2.SapoLoss(tau_positive=0.0)}),
        ("sapo.tau_negative", {"sapo": loss_pb2.SapoLoss(tau_negative=-1.0)}),
        ("gmpo.clip_low", {"gmpo": loss_pb2.GmpoLoss(clip_low=-0.1)}),
        ("gmpo.clip_high", {"gmpo": loss_pb2.GmpoLoss(clip_high=NAN)}),
        ("dppo_tv.delta_low", {"dppo_tv": loss_pb2.DppoTvLoss(delta_low=-0.1)}),
        ("dppo_tv.delta_high", {"dppo_tv": loss_pb2.DppoTvLoss(delta_high=NAN)}),
        ("dppo_tv.ratio_max", {"dppo_tv": loss_pb2.DppoTvLoss(ratio_max=0.0)}),
        ("dro.beta", {"dro": loss_pb2.DroLoss(beta=-1.0)}),
        ("kl.estimator", {"kl": loss_pb2.KlLoss(estimator=9)}),  # type: ignore[arg-type]
        ("value.clip", {"value": loss_pb2.ValueLoss(clip=0.0)}),
        ("registered.options.kl_tau", registered("prime_rl", kl_tau=-1.0)),
        ("registered.options.mask_low", registered("prime_rl", mask_low=2.0)),
        ("registered.options.beta", registered("prime_rl", beta=1.0)),
        ("registered.options.ratio_min", registered("reinforce_is", ratio_min=11.0)),
        ("coefficient", {"ppo": loss_pb2.PpoLoss(), "coefficient": NAN}),
        ("denominator", {"ppo": loss_pb2.PpoLoss(), "denominator": 0.0}),
        ("denominator", {"ppo": loss_pb2.PpoLoss(), "denominator": INF}),
        ("name", {"ppo": loss_pb2.PpoLoss(), "name": "no spaces"}),
        ("correction.kind", correction("UNSPECIFIED", high=2.0)),
        ("correction.high", correction("TOKEN_TRUNCATE")),
        ("correction.low", correction("TOKEN_TRUNCATE", low=0.5, high=2.0)),
        ("correction.low", correction("SEQUENCE_TRUNCATE", low=0.5, high=2.0)),
        ("correction.high", correction("TOKEN_MASK")),
        ("correction.low", correction("SEQUENCE_MASK", low=3.0, high=2.0)),
        ("correction.high", correction("GEOMETRIC_MASK", low=0.9, high=INF)),
        ("correction.token_high", correction("TOKEN_MASK", high=2.0, token_high=3.0)),
        ("correction.high", correction("NONE", high=2.0)),
        ("correction", {**correction("NONE"), "cross_entropy": loss_pb2.CrossEntropyLoss()}),
        ("correction", {**correction("NONE"), "registered": loss_pb2.RegisteredLoss(loss="prime_rl")}),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_number_is_refused_by_field(field: str, fields: dict[str, Any]) -> None:
    good = message(name="good", cross_entropy=loss_pb2.CrossEntropyLoss())
    bad = message(**fields)
    error = refused(lambda: wire.components_of([good, bad]))
    assert error.reason == Reason.INVALID_FIELD
    assert field_of(error) == f"losses[1].{field}"


def test_names_are_unique_and_something_is_asked_for() -> None:
    twice = [message(ppo=loss_pb2.PpoLoss())] * 2
    assert field_of(refused(lambda: wire.components_of(twice))) == "losses[1].name"
    assert field_of(refused(lambda: wire.components_of([]))) == "losses"
    missing = loss_pb2.LossComponent(name="main", ppo=loss_pb2.PpoLoss())
    assert field_of(refused(lambda: wire.components_of([missing]))) == "losses[0].denominator"


def test_an_unknown_loss_is_told_which_there_are() -> None:
    unknown = message(registered=loss_pb2.RegisteredLoss(loss="mine"))
    for wanted in (unknown, message()):
        error = refused(lambda wanted=wanted: wire.components_of([wanted]))  # type: ignore[misc]
        assert error.reason == Reason.UNKNOWN_LOSS
        for name in ("art", "prime_rl", "reinforce_is", "vespo"):
            assert name in error.message
    assert set(LOSS_NAMES) == {*TYPED_NAMES, "art", "prime_rl", "reinforce_is", "vespo"}


def test_an_unknown_option_is_told_which_there_are() -> None:
    wanted = message(registered=loss_pb2.RegisteredLoss(loss="prime_rl", options={"beta": 1.0}))
    assert "mask_low, mask_high, kl_tau" in refused(lambda: wire.components_of([wanted])).message


def test_registered_losses_are_read() -> None:
    options = {"k_positive": 1.0, "lambda_negative": 0.0}
    found = one(registered=loss_pb2.RegisteredLoss(loss="vespo", options=options))
    assert found.loss == Vespo(k_positive=1.0, lambda_negative=0.0)
    assert found.is_policy


def test_a_value_loss_needs_a_value_head() -> None:
    components = [Component("a", Ppo(), 1.0), Component("b", Value(), 1.0)]
    error = refused(lambda: check_value_head(components, has_one=False))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "losses[1].value")
    check_value_head(components, has_one=True)


# Samples.

NEEDS = {
    "behavior_logprobs": Component("main", Ppo(), 1.0),
    "advantages": Component("main", Ppo(), 1.0),
    "proximal_logprobs": Component("main", Ppo(), 1.0, correction=Correction(CorrectionKind.NONE)),
    "reference_logprobs": Component("main", Kl(), 1.0),
    "teacher_logprobs": Component("main", Distillation(), 1.0),
    "returns": Component("main", Value(), 1.0),
    "old_values": Component("main", Value(0.2), 1.0),
}
"""Array -> a component that needs it."""


def full_sample() -> Sample:
    """With every array."""
    row = sample(3, 4, 1)
    numbers = np.linspace(-1, -0.1, 7).astype(np.float32)
    return replace(row, **dict.fromkeys(ARRAYS, numbers))


def test_arrays_are_read_from_messages() -> None:
    numbers = np.arange(3, dtype=np.float32)
    ids = np.array([5, 6, 7], "<i4")
    row = train_sample_pb2.TrainSample(
        chunks=[{"tokens": {"token_ids": ids.tobytes()}}],
        loss_mask=b"\x00\x01\x01",
        **{name: (numbers + at).astype("<f4").tobytes() for at, name in enumerate(ARRAYS)},
    )
    (found,) = wire.samples_of([row])
    for at, name in enumerate(ARRAYS):
        np.testing.assert_array_equal(getattr(found, name), numbers + at)
        assert name in train_sample_pb2.TrainSample.DESCRIPTOR.fields_by_name
    short = train_sample_pb2.TrainSample()
    short.CopyFrom(row)
    short.returns = short.returns[:-1]
    error = refused(lambda: wire.samples_of([row, short]))
    assert field_of(error) == "samples[1].returns"


@pytest.mark.parametrize("name", NEEDS)
def test_an_array_that_a_component_needs_must_be_there(name: str) -> None:
    good, component = full_sample(), NEEDS[name]
    check_samples([good, good], LIMITS, [component])
    error = refused(lambda: check_samples([good, replace(good, **{name: None})], LIMITS, [component]))
    assert error.reason == Reason.INVALID_SAMPLE
    assert field_of(error) == f"samples[1].{name}"
    assert error.metadata["index"] == "1"
    # Not where the component does not apply, nor where nothing is trained.
    other = replace(good, components=frozenset({"other"}), **{name: None})
    check_samples([good, other], LIMITS, [component, Component("other", CrossEntropy(), 1.0)])
    untrained = replace(good, loss_mask=np.zeros(7, np.bool_), **{name: None})
    check_samples([good, untrained], LIMITS, [component])


@pytest.mark.parametrize("weighted", [Kl(importance_weighted=True), Distillation(importance_weighted=True)])
def test_importance_weights_need_behavior_logprobs(weighted: Kl | Distillation) -> None:
    bad = replace(full_sample(), behavior_logprobs=None)
    error = refused(lambda: check_samples([bad], LIMITS, [Component("main", weighted, 1.0)]))
    assert field_of(error) == "samples[0].behavior_logprobs"


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_numbers_are_finite_where_the_mask_is_one(name: str, value: float) -> None:
    """B16: elsewhere they may be anything."""
    good = full_sample()
    components = list({c.loss: replace(c, name=f"c{at}") for at, c in enumerate(NEEDS.values())}.values())
    masked = getattr(good, name).copy()
    masked[2] = value
    check_samples([replace(good, **{name: masked})], LIMITS, components)
    trained = getattr(good, name).copy()
    trained[5] = value
    error = refused(lambda: check_samples([good, replace(good, **{name: trained})], LIMITS, components))
    assert field_of(error) == f"samples[1].{name}"
    assert f"{name}[5]" in error.message


@pytest.mark.parametrize("name", ["loss_mask", *ARRAYS])
def test_arrays_have_the_length_of_the_ids(name: str) -> None:
    good = full_sample()
    bad = replace(good, **{name: getattr(good, name)[:-1]})
    error = refused(lambda: check_samples([good, bad], LIMITS))
    assert field_of(error) == f"samples[1].{name}"
    assert "6 entries for 7 tokens" in error.message


def test_rows_that_cannot_contribute() -> None:
    zero = np.zeros(7, np.float32)
    row = full_sample()
    quiet, mute = replace(row, advantages=zero), replace(row, weights=zero)
    ppo, dro = Component("p", Ppo(), 1.0), Component("d", Dro(), 1.0)
    for component in (ppo, Component("d", Dro(beta=0.0), 1.0), Component("v", Vespo(), 1.0)):
        assert quiet.is_inert([component])
        assert not row.is_inert([component])
    # A square of the distance, a divergence, an entropy or a value moves the policy whatever the advantage.
    others = [Kl(), Distillation(), Entropy(), Value(), CrossEntropy(), Dro(), PrimeRl()]
    for loss in others:
        assert not quiet.is_inert([ppo, Component("o", loss, 1.0)])
        assert mute.is_inert([ppo, dro, Component("o", loss, 1.0)])
    # Whatever is not 0 lies on tokens that the other array silences, or outside the mask.
    crossed = replace(
        row,
        advantages=np.array([1, 1, 1, 1, 0, 1, 0], np.float32),
        weights=np.array([1, 1, 1, 0, 1, 0, 2], np.float32),
    )
    assert crossed.is_inert([ppo])
    assert not crossed.is_inert([ppo, Component("o", CrossEntropy(), 1.0)])
    assert replace(row, components=frozenset({"x"})).is_inert([ppo])
