"""One Drive stream: the calls of many episodes, many a message in both directions.

Every call runs in a task that outlives the stream, so that whoever lost his stream finds the answer on
another one. Replies go out as soon as they are there; those that are there together share a message. A
caller that does not read his replies is not read either: what is unanswered or not yet sent is bounded.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

import structlog

from opentinker_env_host import wire
from opentinker_env_host.domain.host import EnvironmentHost
from opentinker_kit.auth import acting_job
from opentinker_kit.errors import ServiceError, internal_error, new_error_id
from opentinker_kit.required import check_required
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.runtime.channels import MAX_MESSAGE_BYTES
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

MAX_UNANSWERED = 4096
"""Calls of one stream that are played or whose replies are not sent."""
_MESSAGE_BYTES = 1 << 20
"""A response of so many bytes is full."""
_ROOM_BYTES = 1024
"""What a response takes beside its replies."""


class Drive:
    """See the module's text."""

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host
        self._open = 0
        self._replies: deque[pb.DriveReply] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._ending = False

    def end(self) -> None:
        """The server stops: answer what was asked, read no more."""
        self._ending = True
        if self._reading is not None:
            self._reading.cancel()

    async def responses(self, requests: AsyncIterator[pb.DriveRequest]) -> AsyncIterator[pb.DriveResponse]:
        """Answer until the caller has no more to ask. Raises what the requests raised, after the answers."""
        self._reading = reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            while self._open or not reading.done():
                if not self._replies:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                response = self._response()
                yield response
                self._open -= len(response.replies)
                self._room.set()
        finally:
            reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        if self._ending:
            raise ServiceError(Reason.DRAINING)

    async def _read(self, requests: AsyncIterator[pb.DriveRequest]) -> None:
        async for request in requests:
            job = acting_job()
            for call in request.calls:
                while self._open >= MAX_UNANSWERED:
                    self._room.clear()
                    await self._room.wait()
                self._open += 1
                self._host.keep(self._answer(call, job))

    async def _answer(self, call: pb.DriveCall, job: str) -> None:
        reply: pb.DriveReply | None = None
        try:
            check_required(call)
            reply = await self._play(call, job)
            if reply.ByteSize() + _ROOM_BYTES > MAX_MESSAGE_BYTES:
                raise ServiceError(Reason.MESSAGE_TOO_LARGE, metadata={"bytes": reply.ByteSize()})
        except ServiceError as error:
            reply = pb.DriveReply(error=error.to_status())
        except Exception:
            error_id = new_error_id()
            log.exception("drive call failed unexpectedly", error_id=error_id)
            reply = pb.DriveReply(error=internal_error(error_id).to_status())
        finally:
            # A task that is cancelled because the host stops leaves its caller to the broken stream.
            if reply is None:
                self._open -= 1
            else:
                reply.call_id = call.call_id
                self._replies.append(reply)
            self._changed.set()

    async def _play(self, call: pb.DriveCall, job: str) -> pb.DriveReply:
        match call.WhichOneof("call"):
            case "step":
                step = call.step
                _check_token(step, "step")
                action, key = wire.actions_from_proto(step.actions), wire.action_key(step.actions)
                answered = await self._host.step(step.episode, step.seq, key, action, job)
                return pb.DriveReply(step=wire.step_to_proto(answered))
            case "begin":
                _check_token(call.begin, "begin")
                first = await self._host.begin(call.begin.episode, job)
                return pb.DriveReply(begin=wire.begin_to_proto(first))
            case "finalize":
                _check_token(call.finalize, "finalize")
                final = call.finalize
                result = await self._host.finalize(final.episode, final.last_seq, job)
                return pb.DriveReply(finalize=wire.result_to_proto(result))
            case _:
                text = "a call is one of begin, step and finalize"
                raise ServiceError(Reason.INVALID_FIELD, text, field="call")

    def _response(self) -> pb.DriveResponse:
        """What is there to say, as far as it goes into a message."""
        self._host.commit()
        taken: list[pb.DriveReply] = []
        size = 0
        while self._replies and (not taken or size + self._replies[0].ByteSize() <= _MESSAGE_BYTES):
            taken.append(self._replies.popleft())
            size += taken[-1].ByteSize()
        return pb.DriveResponse(replies=taken)


def _check_token(request: pb.BeginRequest | pb.StepRequest | pb.FinalizeRequest, name: str) -> None:
    if request.job_token:
        text = "the stream's messages carry the job token, not their calls"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{name}.job_token")
