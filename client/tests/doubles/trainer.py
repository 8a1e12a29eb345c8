"""A trainer without a model: the operation log, seq order and replay are real, the weights are a hash.

The hash runs over the operations that were done, in order, so two policies that went through the same
training have the same `weights`, and one that lost or repeated an operation has not.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
from client.tests.doubles.tokenizers import files
from google.protobuf.message import Message

from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import DETAILS_KEY, StatusData, encode
from opentinkerapi.runtime.tensors import pack_floats
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceServicer

Context = Any


async def abort(context: Context, reason: Reason, message: str, **metadata: str) -> None:
    """End a call with a typed error."""
    code = CATALOGUE[reason].code
    status = encode(StatusData(code, message, reason, metadata))
    await context.abort(code, message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))


@dataclass
class PolicyState:
    """One policy: its log, and what came of it."""

    name: str
    log: list[tuple[str, bytes, operation_pb2.Operation]] = field(default_factory=list)
    weights: str = ""
    version: int = 0
    step: int = 0
    skipped: int = 0
    open: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    headers: list[operation_pb2.OperationHeader] = field(default_factory=list)

    def absorb(self, *parts: object) -> None:
        """Change the weights."""
        self.weights = hashlib.sha256(repr((self.weights, *parts)).encode()).hexdigest()


Fault = Callable[[str, operation_pb2.OperationHeader, Context], Awaitable[bool]]


class TrainerDouble(TrainerServiceServicer):
    """`before` and `after` are called with (method, header, context) around the logging of an operation."""

    def __init__(self) -> None:
        self.policies: dict[str, PolicyState] = {}
        self.created: dict[str, str] = {}
        self.requests: list[trainer_service_pb2.CreatePolicyRequest] = []
        self.attempt = 1
        self.before: Fault | None = None
        self.after: Fault | None = None
        self.calls: list[str] = []
        self.ran: list[tuple[str, str, list[Any]]] = []
        """(policy, method, messages) of every operation, once each, in order."""
        self.held = asyncio.Event()
        self.held.set()
        self.fail_seqs: dict[int, StatusData] = {}
        self.metrics: dict[str, tuple[float, float]] = {}
        self.score: Callable[[str, Any, Any], Any] = sampled
        """(policy, ForwardStart, TrainSample) -> logprobs; by default those of the inference double."""
        self.value = 0.25
        self.skips = 0
        """How many steps from now on find a gradient that is not finite."""
        self.dtype = "float32"
        self.watches = 0
        self.max_sequence_tokens = 512
        self.tokenizer = files()

    async def CreatePolicy(self, request: trainer_service_pb2.CreatePolicyRequest, context: Context) -> Any:
        self.requests.append(request)
        if request.request_id not in self.created:
            name = f"policies/p{len(self.created)}"
            self.created[request.request_id] = name
            self.policies[name] = PolicyState(name, weights=f"seed {request.seed}")
        name = self.created[request.request_id]
        response = trainer_service_pb2.CreatePolicyResponse()
        response.policy.name = name
        response.policy.base_model = request.base_model
        return response

    async def GetPolicy(self, request: trainer_service_pb2.GetPolicyRequest, context: Context) -> Any:
        state = self.policies[request.policy]
        return trainer_service_pb2.GetPolicyResponse(next_seq=len(state.log) + 1, step=state.step)

    async def GetTokenizer(
        self, request: trainer_service_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.GetTokenizerResponse]:
        kept = TokenizerFiles(self.tokenizer)
        if not request.sha256s:
            yield trainer_service_pb2.GetTokenizerResponse(digest=kept.digest, files=kept.listing())
        for run in kept.runs(request.sha256s):
            yield trainer_service_pb2.GetTokenizerResponse(digest=kept.digest, files=[run])

    async def ForwardBackward(self, requests: AsyncIterator[Any], context: Context) -> Any:
        start, chunks = await _parts(requests)
        if any(sample.loss_mask.count(1) == 0 for chunk in chunks for sample in chunk.samples[:1]):
            pass
        operation = await self._log("ForwardBackward", start.header, [start, *chunks], context)
        return trainer_service_pb2.ForwardBackwardResponse(operation=operation)

    async def Forward(self, requests: AsyncIterator[Any], context: Context) -> Any:
        start, chunks = await _parts(requests)
        operation = await self._log("Forward", start.header, [start, *chunks], context)
        return trainer_service_pb2.ForwardResponse(operation=operation)

    async def OptimStep(self, request: trainer_service_pb2.OptimStepRequest, context: Context) -> Any:
        operation = await self._log("OptimStep", request.header, [request], context)
        return trainer_service_pb2.OptimStepResponse(operation=operation)

    async def SaveCheckpoint(
        self, request: trainer_service_pb2.SaveCheckpointRequest, context: Context
    ) -> Any:
        operation = await self._log("SaveCheckpoint", request.header, [request], context)
        return trainer_service_pb2.SaveCheckpointResponse(operation=operation)

    async def RestoreCheckpoint(
        self, request: trainer_service_pb2.RestoreCheckpointRequest, context: Context
    ) -> Any:
        operation = await self._log("RestoreCheckpoint", request.header, [request], context)
        return trainer_service_pb2.RestoreCheckpointResponse(operation=operation)

    async def PublishWeights(
        self, request: trainer_service_pb2.PublishWeightsRequest, context: Context
    ) -> Any:
        operation = await self._log("PublishWeights", request.header, [request], context)
        return trainer_service_pb2.PublishWeightsResponse(operation=operation)

    async def GetCapabilities(
        self, request: trainer_service_pb2.GetCapabilitiesRequest, context: Context
    ) -> Any:
        return trainer_service_pb2.GetCapabilitiesResponse(
            engine="double", forward_dtype=self.dtype, max_sequence_tokens=self.max_sequence_tokens
        )

    async def WatchOperations(
        self, request: trainer_service_pb2.WatchOperationsRequest, context: Context
    ) -> AsyncIterator[trainer_service_pb2.WatchOperationsResponse]:
        self.watches += 1
        state = self.policies[request.policy]
        seq = request.after_seq
        while True:
            await self.held.wait()
            state.changed.clear()
            while seq < len(state.log):
                seq += 1
                yield trainer_service_pb2.WatchOperationsResponse(operation=state.log[seq - 1][2])
            try:
                await asyncio.wait_for(state.changed.wait(), 0.2)
            except TimeoutError:
                yield trainer_service_pb2.WatchOperationsResponse()

    async def _log(
        self, method: str, header: operation_pb2.OperationHeader, messages: list[Message], context: Context
    ) -> operation_pb2.Operation:
        self.calls.append(method)
        state = self.policies[header.policy]
        if header.attempt < self.attempt:
            await abort(context, Reason.STALE_ATTEMPT, "a newer attempt exists")
        if self.before is not None:
            await self.before(method, header, context)
        body = _body(messages)
        if header.seq <= len(state.log):
            request_id, logged, operation = state.log[header.seq - 1]
            if (request_id, logged) != (header.request_id, body):
                await abort(context, Reason.SEQ_REUSED, f"seq {header.seq} has another request")
            return operation
        assert header.seq == len(state.log) + 1, "the client leaves no gap"
        operation = operation_pb2.Operation(
            policy=header.policy,
            seq=header.seq,
            request_id=header.request_id,
            state=operation_pb2.OPERATION_STATE_DONE,
        )
        operation.engine_time.FromMilliseconds(10)
        if header.seq in self.fail_seqs:
            operation.state = operation_pb2.OPERATION_STATE_FAILED
            operation.error.CopyFrom(encode(self.fail_seqs[header.seq]))
        else:
            self._run(state, method, messages, operation)
        state.headers.append(header)
        state.log.append((header.request_id, body, operation))
        state.changed.set()
        if self.after is not None:
            await self.after(method, header, context)
        return operation

    def _run(
        self, state: PolicyState, method: str, messages: list[Any], done: operation_pb2.Operation
    ) -> None:
        self.ran.append((state.name, method, messages))
        if method in ("Forward", "ForwardBackward"):
            rows = [sample for chunk in messages[1:] for sample in chunk.samples]
            tokens = sum(sample.loss_mask.count(1) for sample in rows)
        if method == "Forward":
            start = messages[0]
            for sample in rows:
                output = done.forward.outputs.add(logprobs=pack_floats(self.score(state.name, start, sample)))
                if start.return_values:
                    output.values = pack_floats(self.value * _mask(sample))
                if start.return_entropy:
                    output.entropy = pack_floats(_mask(sample))
        elif method == "ForwardBackward":
            done.forward_backward.trained_tokens = tokens
            for loss in messages[0].losses:
                done.forward_backward.components.add(component=loss.name, loss_sum=-1.0, weight=tokens)
            for name, (total, weight) in self.metrics.items():
                done.forward_backward.metrics.add(name=name, sum=total, weight=weight)
            state.open.append(done.seq)
            state.absorb("gradient", *(sample.SerializeToString(deterministic=True) for sample in rows))
        elif method == "OptimStep":
            request = messages[0]
            if list(request.forward_backward_seqs) != state.open:
                done.state = operation_pb2.OPERATION_STATE_FAILED
                done.error.CopyFrom(
                    encode(
                        StatusData(
                            grpc.StatusCode.FAILED_PRECONDITION, "incomplete batch", Reason.INCOMPLETE_BATCH
                        )
                    )
                )
                return
            state.open.clear()
            if self.skips:
                self.skips -= 1
                state.skipped += 1
                done.optim_step.step = state.step
                done.optim_step.skipped = True
                done.optim_step.consecutive_skips = state.skipped
                return
            state.skipped = 0
            state.step += 1
            state.absorb("step", request.adamw.SerializeToString(deterministic=True), request.clip_norm)
            done.optim_step.step = state.step
            done.optim_step.grad_norm = 0.5
        elif method == "SaveCheckpoint":
            done.save_checkpoint.checkpoint.name = f"{state.name}/checkpoints/c{state.step}"
            done.save_checkpoint.checkpoint.step = state.step
        elif method == "RestoreCheckpoint":
            done.restore_checkpoint.checkpoint = messages[0].checkpoint
            done.restore_checkpoint.step = state.step
        else:
            state.version += 1
            done.publish_weights.version.policy = state.name
            done.publish_weights.version.version = state.version
            done.publish_weights.version.sha256 = hashlib.sha256(state.weights.encode()).hexdigest()


def rows_of(messages: list[Any]) -> list[Any]:
    """The samples of a Forward or ForwardBackward."""
    return [sample for chunk in messages[1:] for sample in chunk.samples]


def sampled(policy: str, start: Any, sample: Any) -> Any:
    """-0.5 at every loss token."""
    return -0.5 * _mask(sample)


def _mask(sample: Any) -> Any:
    return np.frombuffer(sample.loss_mask, dtype=np.uint8).astype(np.float32)


async def _parts(requests: AsyncIterator[Any]) -> tuple[Any, list[Any]]:
    parts = [request async for request in requests]
    start, chunks = parts[0].start, [part.chunk for part in parts[1:]]
    assert [chunk.index for chunk in chunks] == list(range(start.chunk_count))
    return start, chunks


def _body(messages: list[Message]) -> bytes:
    """What identifies a request: everything but its header's attempt and acknowledgement, and the job
    token.
    """
    texts = []
    for message in messages:
        copy: Any = type(message)()
        copy.CopyFrom(message)
        for name in ("header", "job_token"):
            if name in copy.DESCRIPTOR.fields_by_name:
                copy.ClearField(name)
        texts.append(copy.SerializeToString(deterministic=True))
    return b"|".join(texts)
