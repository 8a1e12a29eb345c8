"""The operation channel of one policy: ordered, pipelined, exactly once.

Operations are submitted one after the other: the next as soon as the one before is acknowledged, which
means logged, not ended; so the trainer always has work and a refused operation leaves no gap. A submission
whose answer is lost is sent again with the same seq and request id. Results come in seq order on one
stream, which is opened again after the last result received.

    submit() -> queue -> _submit_for_ever: seq, request id, send until acknowledged
                         _watch_for_ever: result of seq -> its Pending
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, answer, stream
from opentinker.connection.jobs import Job, Link, Role
from opentinker.connection.portal import Pending, Portal
from opentinker.sampling import identity
from opentinkerapi.runtime.status import decode
from opentinkerapi.trainer.v1 import operation_pb2, trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

R = TypeVar("R")

Send = Callable[[TrainerServiceStub, operation_pb2.OperationHeader, str], Awaitable[Any]]
"""Sends the request with a header and a job token; what it returns is the acknowledgement."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready but for its header. `body` identifies what is asked for."""

    send: Send
    body: bytes


class Operation(Pending[R], Generic[R]):
    """One operation: await it for its result. `seq` is 0 until it is submitted and once it is refused."""

    def __init__(
        self,
        portal: Portal,
        kind: str,
        prepare: Callable[[], Awaitable[Prepared]],
        convert: Callable[[operation_pb2.Operation], Awaitable[R]],
    ) -> None:
        future: asyncio.Future[R] = portal.loop.create_future()
        super().__init__(portal, future, keeps_on=True)
        self.kind = kind
        self.prepare = prepare
        self.convert = convert
        self.seq = 0

    def resolve(self, value: R) -> None:
        """Give the result to who waits."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Give the failure to who waits."""
        if not self._future.done():
            self._future.set_exception(error)
            # Who pipelines may look at the last result only; the failure shows there, as its cause.
            self._future.exception()


class OperationChannel:
    """See the module. Runs on the client's loop; `submit` may be called from any thread."""

    def __init__(self, portal: Portal, job: Job, policy: str, *, next_seq: int = 1) -> None:
        self._portal = portal
        self._job = job
        self._policy = policy
        self._next_seq = next_seq
        self._received = next_seq - 1
        self._queue: asyncio.Queue[Operation[Any]] = asyncio.Queue()
        self._sent: dict[int, Operation[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: BaseException | None = None
        job.on_end.append(self._end)

    def submit(self, operation: Operation[R]) -> Operation[R]:
        """Put an operation behind those submitted before it."""
        self._portal.call(self._enqueue, operation)
        return operation

    async def close(self) -> None:
        """Stop; what has not ended fails as cancelled here and goes on at the trainer."""
        self._end(errors.Cancelled(f"{self._policy} was closed", reason=errors.Reason.CANCELLED))
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _enqueue(self, operation: Operation[Any]) -> None:
        if self._ended is not None:
            operation.fail(self._ended)
            return
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._until_the_end(self._submit_for_ever())),
                asyncio.create_task(self._until_the_end(self._watch_for_ever())),
            ]
        self._queue.put_nowait(operation)

    async def _until_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """A fault that nothing repairs (the job has ended) reaches everyone who waits."""
        try:
            await work
        except Exception as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._ended = self._ended or error
        waiting = list(self._sent.values())
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
        self._sent.clear()
        for operation in waiting:
            operation.fail(self._ended)

    async def _submit_for_ever(self) -> None:
        while True:
            operation = await self._queue.get()
            try:
                prepared = await operation.prepare()
            except Exception as error:
                operation.fail(error)
                continue
            await self._submit(operation, prepared)

    async def _submit(self, operation: Operation[Any], prepared: Prepared) -> None:
        seq = self._next_seq
        request_id = identity.request_id(operation.kind, self._policy, seq, prepared.body.hex())
        # In place before it is sent: its result may come before its acknowledgement.
        operation.seq = seq
        self._sent[seq] = operation

        async def send(link: Link) -> None:
            header = operation_pb2.OperationHeader(
                policy=self._policy,
                seq=seq,
                request_id=request_id,
                attempt=link.attempt,
                acked_seq=self._received,
            )
            await answer(prepared.send(TrainerServiceStub(link.channel), header, link.job_token))

        try:
            await self._job.through(Role.TRAINER, send)
        except errors.OpenTinkerError as error:
            # A seq that carries another request is somebody else's operation, not ours under way.
            theirs = isinstance(error, errors.AlreadyExists)
            if theirs or not await self._was_logged(seq):
                self._sent.pop(seq, None)
                operation.seq = 0
                operation.fail(error)
                return
        self._next_seq += 1

    async def _was_logged(self, seq: int) -> bool:
        """After a submission failed: whether it got into the log nevertheless, so that its result will
        come.
        """

        async def ask(link: Link) -> trainer_service_pb2.GetPolicyResponse:
            request = trainer_service_pb2.GetPolicyRequest(policy=self._policy)
            return await answer(TrainerServiceStub(link.channel).GetPolicy(request))

        try:
            return (await self._job.through(Role.TRAINER, ask)).next_seq > seq
        except errors.NotFound:
            return False

    async def _watch_for_ever(self) -> None:
        while True:
            link = await self._job.link(Role.TRAINER)
            request = trainer_service_pb2.WatchOperationsRequest(
                policy=self._policy, after_seq=self._received, job_token=link.job_token
            )
            call = TrainerServiceStub(link.channel).WatchOperations(request)
            try:
                async for response in stream(call):
                    if response.HasField("operation"):
                        await self._deliver(response.operation)
                        self._job.answered()
                await asyncio.sleep(PAUSE_S)
            except (errors.Unavailable, errors.StaleAttempt, errors.Cancelled) as error:
                await self._job.recover(link, error)
            finally:
                call.cancel()

    async def _deliver(self, wire: operation_pb2.Operation) -> None:
        if wire.seq <= self._received:
            return
        operation = self._sent.pop(wire.seq, None)
        if operation is not None:
            if wire.state == operation_pb2.OPERATION_STATE_FAILED:
                operation.fail(errors.from_status_data(decode(wire.error)))
            else:
                try:
                    operation.resolve(await operation.convert(wire))
                except errors.OpenTinkerError as error:
                    operation.fail(error)
        # Only now: what is acknowledged may be dropped, with the blobs that it names.
        self._received = wire.seq
