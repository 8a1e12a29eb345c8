"""What can be trained, and what it costs: refused by name before anything is made."""

import math

import pydantic
import pytest

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.tuning import (
    FullSpec,
    LinearLayer,
    LoraSpec,
    ModelShape,
    check_tuning,
    policy_bytes,
)
from opentinker_trainer.settings import TrainerSettings
from opentinker_trainer.wire import tuning_message, tuning_of
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.runtime.reasons import Reason

LAYERS = {"q_proj": LinearLayer(2, 64, 128), "up_proj": LinearLayer(2, 64, 256)}
SHAPE = ModelShape(LAYERS, LinearLayer(1, 64, 1000), 300_000, activation_checkpointing=True)


def lora(**fields: object) -> policy_pb2.Tuning:
    return policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=4, **fields))  # type: ignore[arg-type]


def test_defaults_are_filled_in_and_travel() -> None:
    spec = check_tuning(tuning_of(lora()), SHAPE, 64)
    assert spec == LoraSpec(4, 32.0, ("q_proj", "up_proj"))
    head = check_tuning(tuning_of(lora(target_modules=["q_proj", "lm_head"], alpha=8.0)), SHAPE, 64)
    assert head == LoraSpec(4, 8.0, ("lm_head", "q_proj"))
    full = policy_pb2.Tuning(full=policy_pb2.FullTuning(), value_head=True, activation_checkpointing=True)
    assert tuning_of(full) == FullSpec(True, True)
    for known in (spec, head, FullSpec(True, True), FullSpec(), LoraSpec(1, 2.0, ("q_proj",), True, True)):
        assert tuning_of(tuning_message(known)) == known


@pytest.mark.parametrize(
    ("tuning", "field", "reason"),
    [
        (policy_pb2.Tuning(), "tuning", Reason.INVALID_FIELD),
        (lora(dropout=0.1), "tuning.lora.dropout", Reason.UNSUPPORTED_OPTION),
        (lora(dropout=math.nan), "tuning.lora.dropout", Reason.UNSUPPORTED_OPTION),
        (lora(alpha=0.0), "tuning.lora.alpha", Reason.INVALID_FIELD),
        (lora(alpha=math.inf), "tuning.lora.alpha", Reason.INVALID_FIELD),
        (lora(target_modules=["w_proj"]), "tuning.lora.target_modules", Reason.INVALID_FIELD),
        (policy_pb2.Tuning(lora=policy_pb2.LoraTuning(rank=65)), "tuning.lora.rank", Reason.INVALID_FIELD),
        (policy_pb2.Tuning(lora=policy_pb2.LoraTuning()), "tuning.lora.rank", Reason.INVALID_FIELD),
    ],
)
def test_what_cannot_be_is_refused_by_name(tuning: policy_pb2.Tuning, field: str, reason: Reason) -> None:
    with pytest.raises(ServiceError) as caught:
        check_tuning(tuning_of(tuning), SHAPE, 64)
    assert (caught.value.field, caught.value.reason) == (field, reason)


def test_activation_checkpointing_needs_layers_that_can() -> None:
    stiff = ModelShape(LAYERS, SHAPE.output_layer, SHAPE.weight_count, activation_checkpointing=False)
    for spec in (
        FullSpec(activation_checkpointing=True),
        LoraSpec(4, 8.0, (), activation_checkpointing=True),
    ):
        with pytest.raises(ServiceError) as caught:
            check_tuning(spec, stiff, 64)
        assert caught.value.field == "tuning.activation_checkpointing"


def test_memory_of_a_policy() -> None:
    """Five float32 arrays of every trained weight, and a copy where the forward pass is narrower."""
    full = policy_bytes(FullSpec(), SHAPE, forward_bytes=4)
    assert full == 300_000 * 4 * 5
    assert policy_bytes(FullSpec(), SHAPE, forward_bytes=2) == full + 300_000 * 2
    assert policy_bytes(FullSpec(), SHAPE, forward_bytes=4, ranks=4) == full // 4
    adapter = policy_bytes(LoraSpec(4, 8.0, ("lm_head", "q_proj")), SHAPE, forward_bytes=2, ranks=4)
    assert adapter == (2 * 4 * (64 + 128) + 4 * (64 + 1000)) * 4 * 5
    assert policy_bytes(FullSpec(value_head=True), SHAPE, forward_bytes=4) == full + 65 * 4 * 5


def test_sequences_are_not_spread_over_ranks() -> None:
    """B09, B20: context parallelism is refused by name: no token can be counted twice, or not at all."""
    with pytest.raises(pydantic.ValidationError, match="context parallelism is not supported"):
        TrainerSettings(base_model="tiny", context_parallel=2)
    with pytest.raises(pydantic.ValidationError, match="noop engine is one process"):
        TrainerSettings(base_model="tiny", engine="noop", ranks=2)
    settings = TrainerSettings(base_model="tiny", ranks=1000)
    assert settings.engine_threads() == 1
