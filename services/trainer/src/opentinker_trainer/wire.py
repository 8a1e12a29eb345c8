"""Between the messages and the domain; `wire_losses` has what concerns losses."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.samples import ARRAYS, Sample, invalid
from opentinker_trainer.domain.support import Support
from opentinker_trainer.domain.tuning import (
    DEFAULT_ALPHA,
    AdamWStep,
    FullSpec,
    LoraSpec,
    TuningSpec,
    check_step,
)
from opentinker_trainer.wire_images import chunks_of
from opentinker_trainer.wire_losses import components_of
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import loss_pb2, train_sample_pb2
from opentinkerapi.runtime.images import ImageSettings
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

__all__ = [
    "components_of",
    "denominators_of",
    "metric_messages",
    "samples_of",
    "step_of",
    "tuning_message",
    "tuning_of",
]

_IDS = np.dtype("<i4")
_FLOATS = np.dtype("<f4")


def samples_of(
    messages: Sequence[train_sample_pb2.TrainSample], images: ImageSettings | None = None
) -> list[Sample]:
    """The rows of a request for a model with these image settings.

    ServiceError INVALID_SAMPLE or UNSUPPORTED_OPTION, with the index.
    """
    return [_sample(index, message, images) for index, message in enumerate(messages)]


def _sample(index: int, message: train_sample_pb2.TrainSample, settings: ImageSettings | None) -> Sample:
    ids, images = chunks_of(index, message, settings)
    if message.loss_mask.strip(b"\x00\x01"):
        raise invalid(index, None, "loss_mask holds bytes other than 0 and 1", "loss_mask")
    return Sample(
        token_ids=np.frombuffer(ids, _IDS).astype(np.int32),
        loss_mask=np.frombuffer(message.loss_mask, np.uint8).astype(np.bool_),
        **{name: _floats(index, name, getattr(message, name)) for name in ARRAYS},
        temperature=message.sampling_temperature if message.HasField("sampling_temperature") else 1.0,
        support=_support(index, message),
        components=frozenset(message.components) if message.components else None,
        sample_id=message.sample_id,
        images=images,
    )


def _floats(index: int, name: str, data: bytes) -> NDArray[np.float32] | None:
    if not data:
        return None
    _whole(index, name, data)
    return np.frombuffer(data, _FLOATS).astype(np.float32)


def _support(index: int, message: train_sample_pb2.TrainSample) -> Support | None:
    sizes, ids = message.support_sizes, message.support_token_ids
    if not sizes and not ids:
        return None
    _whole(index, "support_sizes", sizes)
    _whole(index, "support_token_ids", ids)
    return Support(*(np.frombuffer(data, _IDS).astype(np.int32) for data in (sizes, ids)))


def _whole(index: int, name: str, data: bytes) -> None:
    if len(data) % 4:
        raise invalid(index, None, f"{name} has {len(data)} bytes, which is no multiple of 4", name)


def step_of(adamw: trainer_service_pb2.AdamW, clip_norm: float | None) -> AdamWStep:
    """The hyperparameters of a step, defaults filled in. ServiceError INVALID_FIELD."""
    step = AdamWStep(
        learning_rate=adamw.learning_rate,
        beta1=adamw.beta1 if adamw.HasField("beta1") else 0.9,
        beta2=adamw.beta2 if adamw.HasField("beta2") else 0.999,
        eps=adamw.eps if adamw.HasField("eps") else 1e-8,
        weight_decay=adamw.weight_decay if adamw.HasField("weight_decay") else 0.0,
        clip_norm=clip_norm,
    )
    check_step(step)
    return step


def denominators_of(messages: Iterable[loss_pb2.ComponentDenominator]) -> dict[str, float]:
    """Denominators by component. ServiceError INVALID_FIELD."""
    result: dict[str, float] = {}
    for index, message in enumerate(messages):
        if message.component in result or not 0 < message.denominator < float("inf"):
            text = "must be a positive finite number, once for each component"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"denominators[{index}]")
        result[message.component] = message.denominator
    return result


def tuning_of(message: policy_pb2.Tuning) -> TuningSpec:
    """What is to be trained. ServiceError UNSUPPORTED_OPTION for what this trainer does not have."""
    kind = message.WhichOneof("kind")
    if kind == "full":
        return FullSpec(message.value_head, message.activation_checkpointing)
    if kind != "lora":
        text = "say what is trained: an adapter (tuning.lora) or every weight (tuning.full)"
        raise ServiceError(Reason.INVALID_FIELD, text, field="tuning")
    lora = message.lora
    if lora.dropout != 0:
        text = f"dropout is {lora.dropout:g}; only 0 is taken, so that a pass is a function of its request"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tuning.lora.dropout")
    return LoraSpec(
        lora.rank,
        lora.alpha if lora.HasField("alpha") else DEFAULT_ALPHA,
        tuple(lora.target_modules),
        message.value_head,
        message.activation_checkpointing,
    )


def tuning_message(spec: TuningSpec) -> policy_pb2.Tuning:
    """`tuning_of` backwards, every field set."""
    message = policy_pb2.Tuning(
        value_head=spec.value_head, activation_checkpointing=spec.activation_checkpointing
    )
    if isinstance(spec, FullSpec):
        message.full.SetInParent()
    else:
        message.lora.CopyFrom(
            policy_pb2.LoraTuning(rank=spec.rank, alpha=spec.alpha, target_modules=spec.target_modules)
        )
    return message


def metric_messages(metrics: Mapping[str, tuple[float, float]]) -> list[loss_pb2.Metric]:
    """Metrics by name, in name order."""
    return [
        loss_pb2.Metric(name=name, sum=total, weight=weight)
        for name, (total, weight) in sorted(metrics.items())
    ]
