"""TrainerService: each method reads its request, asks the application, and answers."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import grpc.aio

from opentinker_kit.accounts import Gate
from opentinker_kit.auth import Access, acting_attempt, acting_job, acting_project
from opentinker_kit.errors import ServiceError
from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinker_trainer.application.admission import Admission, ByteBudget
from opentinker_trainer.application.holdings import Holdings, not_held
from opentinker_trainer.application.trainer import Trainer
from opentinker_trainer.domain.losses import LOSS_NAMES
from opentinker_trainer.domain.names import checkpoint_policy
from opentinker_trainer.domain.tuning import TUNINGS
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc

SERVICE = "opentinkerapi.trainer.v1.TrainerService"
METHODS = tuple(
    method.name for method in trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"].methods
)
_OF_THE_SERVER = ("GetTokenizer", "GetCapabilities")
"""What is asked about the server and no job."""
ACCESS: Mapping[str, Access] = {
    f"/{SERVICE}/{name}": Access.CALLER if name in _OF_THE_SERVER else Access.JOB for name in METHODS
}

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_REMEMBER_S = 3600.0


PartT = TypeVar("PartT", trainer_service_pb2.ForwardRequest, trainer_service_pb2.ForwardBackwardRequest)


class TrainerServicer(trainer_service_pb2_grpc.TrainerServiceServicer):
    """See trainer_service.proto."""

    def __init__(
        self,
        trainer: Trainer,
        admission: Admission,
        holdings: Holdings,
        gate: Gate,
        *,
        engine: str,
        dtype: str,
        ranks: int,
        budget: ByteBudget,
        max_operation_bytes: int,
    ) -> None:
        self._trainer = trainer
        self._admission = admission
        self._holdings = holdings
        self._gate = gate
        self._engine = engine
        self._dtype = dtype
        self._ranks = ranks
        self._budget = budget
        self._max_operation_bytes = max_operation_bytes
        self._unloaded: dict[str, tuple[str, float]] = {}
        self.tokenizer = TokenizerFiles({})
        """The base model's, once it is found."""

    async def CreatePolicy(
        self, request: trainer_service_pb2.CreatePolicyRequest, context: _Context
    ) -> trainer_service_pb2.CreatePolicyResponse:
        job = acting_job()
        if job and request.job != job:
            text = f"the call is made for {job}, and {request.job or 'no job'} is to hold the policy"
            raise ServiceError(Reason.JOB_NOT_FOUND, text, field="job")
        if job:
            self._holdings.check_token(job, acting_attempt())
        if request.from_checkpoint:
            await self._check_checkpoint(request.from_checkpoint, "from_checkpoint")
        record = await self._trainer.create(request, acting_project())
        return trainer_service_pb2.CreatePolicyResponse(policy=record.policy, version=record.version)

    async def UnloadPolicy(
        self, request: trainer_service_pb2.UnloadPolicyRequest, context: _Context
    ) -> trainer_service_pb2.UnloadPolicyResponse:
        self._check_own(request.policy)
        now = time.monotonic()
        self._unloaded = {k: v for k, v in self._unloaded.items() if v[1] > now - _REMEMBER_S}
        key = f"{acting_job()}|{request.request_id}"
        before = self._unloaded.get(key)
        if before is None:
            await self._trainer.unload(request.policy, request.attempt)
            self._unloaded[key] = (request.policy, now)
        elif before[0] != request.policy:
            text = f"request_id {request.request_id!r} unloaded {before[0]}"
            raise ServiceError(Reason.REQUEST_ID_REUSED, text, field="request_id")
        return trainer_service_pb2.UnloadPolicyResponse()

    async def GetPolicy(
        self, request: trainer_service_pb2.GetPolicyRequest, context: _Context
    ) -> trainer_service_pb2.GetPolicyResponse:
        self._check_own(request.policy)
        return self._trainer.describe(request.policy)

    async def Forward(
        self, request_iterator: AsyncIterator[trainer_service_pb2.ForwardRequest], context: _Context
    ) -> trainer_service_pb2.ForwardResponse:
        first = await _first(request_iterator)
        self._check_own(first.start.header.policy)
        with self._budget.taking() as portion:
            chunks = await self._chunks(request_iterator, first.start.chunk_count, portion.take)
            logged = pb.LoggedOperation(forward=pb.LoggedForward(start=first.start, chunks=chunks))
            operation = await self._admission.admit(first.start.header, logged)
        return trainer_service_pb2.ForwardResponse(operation=operation)

    async def ForwardBackward(
        self, request_iterator: AsyncIterator[trainer_service_pb2.ForwardBackwardRequest], context: _Context
    ) -> trainer_service_pb2.ForwardBackwardResponse:
        first = await _first(request_iterator)
        self._check_own(first.start.header.policy)
        with self._budget.taking() as portion:
            chunks = await self._chunks(request_iterator, first.start.chunk_count, portion.take)
            body = pb.LoggedForwardBackward(start=first.start, chunks=chunks)
            operation = await self._admission.admit(
                first.start.header, pb.LoggedOperation(forward_backward=body)
            )
        return trainer_service_pb2.ForwardBackwardResponse(operation=operation)

    async def OptimStep(
        self, request: trainer_service_pb2.OptimStepRequest, context: _Context
    ) -> trainer_service_pb2.OptimStepResponse:
        self._check_own(request.header.policy)
        operation = await self._admission.admit(request.header, pb.LoggedOperation(optim_step=request))
        return trainer_service_pb2.OptimStepResponse(operation=operation)

    async def SaveCheckpoint(
        self, request: trainer_service_pb2.SaveCheckpointRequest, context: _Context
    ) -> trainer_service_pb2.SaveCheckpointResponse:
        self._check_own(request.header.policy)
        operation = await self._admission.admit(request.header, pb.LoggedOperation(save_checkpoint=request))
        return trainer_service_pb2.SaveCheckpointResponse(operation=operation)

    async def RestoreCheckpoint(
        self, request: trainer_service_pb2.RestoreCheckpointRequest, context: _Context
    ) -> trainer_service_pb2.RestoreCheckpointResponse:
        self._check_own(request.header.policy)
        await self._check_checkpoint(request.checkpoint, "checkpoint")
        operation = await self._admission.admit(
            request.header, pb.LoggedOperation(restore_checkpoint=request)
        )
        return trainer_service_pb2.RestoreCheckpointResponse(operation=operation)

    async def PublishWeights(
        self, request: trainer_service_pb2.PublishWeightsRequest, context: _Context
    ) -> trainer_service_pb2.PublishWeightsResponse:
        self._check_own(request.header.policy)
        operation = await self._admission.admit(request.header, pb.LoggedOperation(publish_weights=request))
        return trainer_service_pb2.PublishWeightsResponse(operation=operation)

    async def WatchOperations(
        self, request: trainer_service_pb2.WatchOperationsRequest, context: _Context
    ) -> AsyncIterator[trainer_service_pb2.WatchOperationsResponse]:
        self._holdings.check_open()
        self._check_own(request.policy)
        async for operation in self._admission.watch(request.policy, request.after_seq):
            yield trainer_service_pb2.WatchOperationsResponse(operation=operation)

    async def GetOperation(
        self, request: trainer_service_pb2.GetOperationRequest, context: _Context
    ) -> trainer_service_pb2.GetOperationResponse:
        self._check_own(request.policy)
        operation = await self._admission.get(request.policy, request.seq, request.wait.ToTimedelta())
        return trainer_service_pb2.GetOperationResponse(operation=operation)

    async def GetTokenizer(
        self, request: trainer_service_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[trainer_service_pb2.GetTokenizerResponse]:
        if self._admission.limits is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        files = self.tokenizer
        if not request.sha256s:
            yield trainer_service_pb2.GetTokenizerResponse(digest=files.digest, files=files.listing())
            return
        for run in files.runs(request.sha256s):
            yield trainer_service_pb2.GetTokenizerResponse(digest=files.digest, files=[run])

    async def GetCapabilities(
        self, request: trainer_service_pb2.GetCapabilitiesRequest, context: _Context
    ) -> trainer_service_pb2.GetCapabilitiesResponse:
        limits = self._admission.limits
        if limits is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        return trainer_service_pb2.GetCapabilitiesResponse(
            base_model=self._trainer.base.model_id,
            base_digest=self._trainer.base.digest,
            engine=self._engine,
            losses=LOSS_NAMES,
            max_sequence_tokens=limits.max_sequence_tokens,
            max_lora_rank=self._trainer.base.max_lora_rank,
            forward_dtype=self._dtype,
            methods=METHODS,
            tunings=TUNINGS,
            ranks=self._ranks,
            images=limits.images is not None,
        )

    def _check_own(self, name: str) -> None:
        """POLICY_NOT_FOUND, as for one that is not held here, for a policy of another job than the call's;
        STALE_ATTEMPT for an old token.
        """
        job = acting_job()
        if not job:
            return
        if self._holdings.get(name).job != job:
            raise not_held(name)
        self._holdings.check_token(job, acting_attempt())

    async def _check_checkpoint(self, name: str, field: str) -> None:
        """CHECKPOINT_NOT_FOUND for a checkpoint of another project."""
        if acting_job() and not await self._gate.owns(checkpoint_policy(name)):
            raise ServiceError(Reason.CHECKPOINT_NOT_FOUND, f"there is no checkpoint {name}", field=field)

    async def _chunks(
        self, messages: AsyncIterator[PartT], count: int, take: Callable[[int], None]
    ) -> list[trainer_service_pb2.SampleChunk]:
        """The chunks after the start, all of them and in order. INVALID_FIELD, QUOTA_EXCEEDED."""
        chunks: list[trainer_service_pb2.SampleChunk] = []
        size = 0
        async for message in messages:
            if message.WhichOneof("part") != "chunk" or message.chunk.index != len(chunks):
                text = f"chunk {len(chunks)} was expected next, of {count}"
                raise ServiceError(Reason.INVALID_FIELD, text, field="chunk.index")
            size += message.ByteSize()
            if size > self._max_operation_bytes:
                text = f"an operation may have {self._max_operation_bytes} bytes; send less at a time"
                raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[("operation bytes", text)])
            take(message.ByteSize())
            chunks.append(message.chunk)
        if len(chunks) != count:
            text = f"the start announced {count} chunks and {len(chunks)} came"
            raise ServiceError(Reason.INVALID_FIELD, text, field="start.chunk_count")
        return chunks


async def _first(messages: AsyncIterator[PartT]) -> PartT:
    """The first message of a streamed body, which must be the start."""
    async for message in messages:
        if message.WhichOneof("part") == "start":
            return message
        break
    raise ServiceError(Reason.INVALID_FIELD, "the first message must be the start", field="part")
