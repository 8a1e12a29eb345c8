"""Bodies of policy operations: samples cut into chunks, large ones uploaded, each body with its identity."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

from google.protobuf.message import Message

from opentinker.connection.blobs import Blobs
from opentinker.sampling.prompt import upload_large
from opentinker.training.operations import Prepared
from opentinker.training.samples import TrainSample
from opentinker.training.tuning import AdamW
from opentinkerapi.data.v1 import loss_pb2
from opentinkerapi.runtime.tensors import INLINE_MAX_BYTES
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

CHUNK_BYTES = 1024 * 1024
"""About how much one message of a stream carries."""

Header = operation_pb2.OperationHeader


async def chunks(samples: Sequence[TrainSample], blobs: Blobs) -> list[trainer_service_pb2.SampleChunk]:
    """The samples in order, in messages of about a megabyte; a single sample over 2 MiB goes by a blob."""
    made: list[trainer_service_pb2.SampleChunk] = []
    current = trainer_service_pb2.SampleChunk(index=0)
    room = CHUNK_BYTES
    for sample in samples:
        wire = sample.to_wire()
        await upload_large(wire.chunks, blobs)
        size = wire.ByteSize()
        if current.samples and size > room:
            made.append(current)
            current = trainer_service_pb2.SampleChunk(index=len(made))
            room = CHUNK_BYTES
        current.samples.append(wire)
        room -= size
    made.append(current)
    return [await _by_blob(chunk, blobs) if chunk.ByteSize() > INLINE_MAX_BYTES else chunk for chunk in made]


async def _by_blob(chunk: trainer_service_pb2.SampleChunk, blobs: Blobs) -> trainer_service_pb2.SampleChunk:
    blob = await blobs.upload(chunk.SerializeToString(deterministic=True))
    return trainer_service_pb2.SampleChunk(index=chunk.index, blob=blob)


async def forward(
    samples: Sequence[TrainSample], blobs: Blobs, *, entropy: bool, values: bool, base_model: bool
) -> Prepared:
    """A Forward."""
    parts = await chunks(samples, blobs)
    start = trainer_service_pb2.ForwardStart(
        chunk_count=len(parts),
        return_entropy=entropy,
        return_values=values,
        use_base_model=base_model,
    )

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        first = trainer_service_pb2.ForwardStart(header=header)
        first.MergeFrom(start)
        requests = [trainer_service_pb2.ForwardRequest(start=first, job_token=token)]
        requests += [trainer_service_pb2.ForwardRequest(chunk=part) for part in parts]
        return await stub.Forward(iter(requests))

    return Prepared(send, identity([start, *parts]))


async def forward_backward(
    samples: Sequence[TrainSample],
    losses: Sequence[loss_pb2.LossComponent],
    blobs: Blobs,
    *,
    logprobs: bool,
    skip_inert: bool,
) -> Prepared:
    """A ForwardBackward."""
    parts = await chunks(samples, blobs)
    start = trainer_service_pb2.ForwardBackwardStart(
        chunk_count=len(parts), losses=losses, return_logprobs=logprobs, skip_inert_rows=skip_inert
    )

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        first = trainer_service_pb2.ForwardBackwardStart(header=header)
        first.MergeFrom(start)
        requests = [trainer_service_pb2.ForwardBackwardRequest(start=first, job_token=token)]
        requests += [trainer_service_pb2.ForwardBackwardRequest(chunk=part) for part in parts]
        return await stub.ForwardBackward(iter(requests))

    return Prepared(send, identity([start, *parts]))


def optim_step(optimizer: AdamW, covered: Sequence[int], denominators: Mapping[str, float]) -> Prepared:
    """An OptimStep over the ForwardBackwards with the given seqs."""
    body = trainer_service_pb2.OptimStepRequest(
        forward_backward_seqs=covered,
        adamw=optimizer.to_wire(),
        denominators=[
            loss_pb2.ComponentDenominator(component=name, denominator=value)
            for name, value in sorted(denominators.items())
        ],
    )
    if optimizer.clip_norm is not None:
        body.clip_norm = optimizer.clip_norm

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        request = trainer_service_pb2.OptimStepRequest(header=header, job_token=token)
        request.MergeFrom(body)
        return await stub.OptimStep(request)

    return Prepared(send, identity([body]))


def save_checkpoint(display_name: str, keep: int | None = None, ttl: timedelta | None = None) -> Prepared:
    """A SaveCheckpoint."""
    body = trainer_service_pb2.SaveCheckpointRequest(display_name=display_name, keep_checkpoints=keep or 0)
    if ttl is not None:
        body.ttl.FromTimedelta(ttl)

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        request = trainer_service_pb2.SaveCheckpointRequest(header=header, job_token=token)
        request.MergeFrom(body)
        return await stub.SaveCheckpoint(request)

    return Prepared(send, identity([body]))


def restore_checkpoint(checkpoint: str, weights_only: bool) -> Prepared:
    """A RestoreCheckpoint."""

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        return await stub.RestoreCheckpoint(
            trainer_service_pb2.RestoreCheckpointRequest(
                header=header, checkpoint=checkpoint, weights_only=weights_only, job_token=token
            )
        )

    return Prepared(send, f"{checkpoint}/{weights_only}".encode())


def publish_weights() -> Prepared:
    """A PublishWeights."""

    async def send(stub: TrainerServiceStub, header: Header, token: str) -> object:
        return await stub.PublishWeights(
            trainer_service_pb2.PublishWeightsRequest(header=header, job_token=token)
        )

    return Prepared(send, b"")


def identity(messages: Iterable[Message]) -> bytes:
    """A hash over the bodies, the same in every process."""
    digest = hashlib.sha256()
    for message in messages:
        data = message.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
