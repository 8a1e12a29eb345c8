"""Between the messages and the domain; `wire_losses` has what concerns losses."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from opentinker_kit.errors import ServiceError
from opentinker_trainer.domain.samples import ARRAYS, Sample, invalid
from opentinker_trainer.domain.tuning import AdamWStep, LoraSpec, check_step
from opentinker_trainer.wire_losses import components_of
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import loss_pb2, train_sample_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2

__all__ = [
    "components_of",
    "denominators_of",
    "lora_message",
    "lora_of",
    "metric_messages",
    "samples_of",
    "step_of",
]

_IDS = np.dtype("<i4")
_FLOATS = np.dtype("<f4")


def samples_of(messages: Sequence[train_sample_pb2.TrainSample]) -> list[Sample]:
    """The rows of a request. ServiceError INVALID_SAMPLE or UNSUPPORTED_OPTION, with the index."""
    return [_sample(index, message) for index, message in enumerate(messages)]


def _sample(index: int, message: train_sample_pb2.TrainSample) -> Sample:
    runs: list[bytes] = []
    for chunk in message.chunks:
        match chunk.WhichOneof("chunk"):
            case "tokens":
                runs.append(chunk.tokens.token_ids)
            case "image":
                text = f"sample {index} holds an image; this server trains on tokens only"
                raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=f"samples[{index}].chunks")
            case _:
                raise invalid(index, None, "a chunk is empty", "chunks")
    ids = b"".join(runs)
    if len(ids) % _IDS.itemsize:
        raise invalid(index, None, f"token_ids has {len(ids)} bytes, which is no multiple of 4", "chunks")
    if message.loss_mask.strip(b"\x00\x01"):
        raise invalid(index, None, "loss_mask holds bytes other than 0 and 1", "loss_mask")
    return Sample(
        token_ids=np.frombuffer(ids, _IDS).astype(np.int32),
        loss_mask=np.frombuffer(message.loss_mask, np.uint8).astype(np.bool_),
        **{name: _floats(index, name, getattr(message, name)) for name in ARRAYS},
        temperature=message.sampling_temperature if message.HasField("sampling_temperature") else 1.0,
        components=frozenset(message.components) if message.components else None,
        sample_id=message.sample_id,
    )


def _floats(index: int, name: str, data: bytes) -> NDArray[np.float32] | None:
    if not data:
        return None
    if len(data) % _FLOATS.itemsize:
        raise invalid(index, None, f"{name} has {len(data)} bytes, which is no multiple of 4", name)
    return np.frombuffer(data, _FLOATS).astype(np.float32)


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


def lora_of(message: policy_pb2.LoraTuning) -> LoraSpec:
    """A complete adapter specification, as the front sends it to the engine."""
    return LoraSpec(message.rank, message.alpha, tuple(message.target_modules))


def lora_message(spec: LoraSpec) -> policy_pb2.LoraTuning:
    """`lora_of` backwards."""
    return policy_pb2.LoraTuning(rank=spec.rank, alpha=spec.alpha, target_modules=spec.target_modules)


def metric_messages(metrics: Mapping[str, tuple[float, float]]) -> list[loss_pb2.Metric]:
    """Metrics by name, in name order."""
    return [
        loss_pb2.Metric(name=name, sum=total, weight=weight)
        for name, (total, weight) in sorted(metrics.items())
    ]
