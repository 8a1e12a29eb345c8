"""Begin, Step and Finalize over one Drive stream, or by a call each where the host has no Drive.

All sessions of a source share the stream: what they ask for in one turn of the event loop goes out in one
message. A stream that breaks fails the calls that it left unanswered as a lost connection does; whoever makes
them again opens another one, and the host plays nothing twice.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from opentinker.environments.session import typed_error
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceStub
from opentinkerapi.runtime.errors import (
    Cancelled,
    InternalError,
    OpenTinkerError,
    PermissionDenied,
    Unimplemented,
    from_rpc_error,
    from_status_data,
)
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import decode

_MESSAGE_BYTES = 1 << 20
"""A message of so many bytes is full."""


class EpisodeCalls:
    """See the module's text. Each method takes a request without a job token, and a timeout in seconds; it
    raises typed errors, or grpc.RpcError where it made a call of its own.
    """

    def __init__(self, stub: EnvHostServiceStub, job_token: Callable[[], str]) -> None:
        self._stub = stub
        self._job_token = job_token
        self._stream: _Stream | None = None
        self._offered = True

    async def begin(self, request: pb.BeginRequest, *, timeout: float) -> pb.BeginResponse:
        """The first observation."""
        if (reply := await self._drive(pb.DriveCall(begin=request), timeout)) is not None:
            return reply.begin
        request.job_token = self._job_token()
        return await self._stub.Begin(request, timeout=timeout)

    async def step(self, request: pb.StepRequest, *, timeout: float) -> pb.StepResponse:
        """What came of a turn."""
        if (reply := await self._drive(pb.DriveCall(step=request), timeout)) is not None:
            return reply.step
        request.job_token = self._job_token()
        return await self._stub.Step(request, timeout=timeout)

    async def finalize(self, request: pb.FinalizeRequest, *, timeout: float) -> pb.FinalizeResponse:
        """The rewards of the whole episode."""
        if (reply := await self._drive(pb.DriveCall(finalize=request), timeout)) is not None:
            return reply.finalize
        request.job_token = self._job_token()
        return await self._stub.Finalize(request, timeout=timeout)

    def close(self) -> None:
        """End the stream; calls that wait for an answer fail."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _drive(self, call: pb.DriveCall, timeout: float) -> pb.DriveReply | None:
        """The reply; None where the host has no Drive."""
        if not self._offered:
            return None
        if self._stream is None or self._stream.error is not None:
            self._stream = _Stream(self._stub, self._job_token)
        stream = self._stream
        try:
            reply = await stream.ask(call, timeout)
        except (Unimplemented, PermissionDenied):
            if stream.answered:
                raise
            # A host of an older version, or something between that lets no streams through.
            self._offered = False
            return None
        if reply.HasField("error"):
            raise from_status_data(decode(reply.error))
        return reply


class _Stream:
    """One Drive call, from its first request to its end."""

    def __init__(self, stub: EnvHostServiceStub, job_token: Callable[[], str]) -> None:
        self.error: OpenTinkerError | None = None
        """What ended it."""
        self.answered = False
        """Whether a reply ever came."""
        self._job_token = job_token
        self._told_token = ""
        self._last_id = 0
        self._unsent: list[pb.DriveCall] = []
        self._more = asyncio.Event()
        self._waiting: dict[int, tuple[asyncio.Future[pb.DriveReply], float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._call = stub.Drive(self._requests())
        self._reading = asyncio.create_task(self._read(), name="drive stream")

    async def ask(self, call: pb.DriveCall, timeout: float) -> pb.DriveReply:
        """The reply to a call. Raises what ended the stream, or DEADLINE_EXCEEDED."""
        loop = asyncio.get_running_loop()
        self._last_id += 1
        call.call_id = self._last_id
        future: asyncio.Future[pb.DriveReply] = loop.create_future()
        self._waiting[self._last_id] = (future, loop.time() + timeout)
        self._unsent.append(call)
        self._more.set()
        if self._timer is None:
            self._timer = loop.call_later(timeout, self._look)
        return await future

    def close(self) -> None:
        """End it from here."""
        self._end(typed_error(Reason.CONNECTION_LOST, "the source of the episode was closed"))
        self._call.cancel()

    async def _requests(self) -> AsyncIterator[pb.DriveRequest]:
        while self.error is None:
            await self._more.wait()
            self._more.clear()
            while self._unsent:
                yield self._message()

    def _message(self) -> pb.DriveRequest:
        """What is not sent yet, as far as it goes into a message."""
        size = number = 0
        for call in self._unsent:
            size += call.ByteSize()
            if number and size > _MESSAGE_BYTES:
                break
            number += 1
        request = pb.DriveRequest(calls=self._unsent[:number])
        del self._unsent[:number]
        token = self._job_token()
        if token != self._told_token:
            request.job_token = self._told_token = token
        return request

    async def _read(self) -> None:
        error = typed_error(Reason.CONNECTION_LOST, "the stream was cancelled")
        try:
            call: Any = self._call
            async for response in call:
                self.answered = True
                for reply in response.replies:
                    future, _ = self._waiting.pop(reply.call_id, (None, 0.0))
                    if future is not None and not future.done():
                        future.set_result(reply)
            error = typed_error(Reason.CONNECTION_LOST, "the host ended the stream")
        except grpc.RpcError as failure:
            typed = from_rpc_error(failure)
            # A host that stops cancels what it has no time for; gRPC calls it internal, without an error id,
            # where a message could not be sent because the stream had just ended.
            broken = isinstance(typed, InternalError) and not typed.error_id
            if not isinstance(typed, Cancelled) and not broken:
                error = typed
        finally:
            self._end(error)

    def _look(self) -> None:
        """Give up calls that are not answered in their time. They are made with one and the same timeout, so
        that the oldest is the first.
        """
        self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting:
            number, (future, deadline) = next(iter(self._waiting.items()))
            if deadline > loop.time():
                self._timer = loop.call_at(deadline, self._look)
                return
            del self._waiting[number]
            if not future.done():
                text = "the host gave no answer in time"
                future.set_exception(typed_error(Reason.DEADLINE_EXCEEDED, text))

    def _end(self, error: OpenTinkerError) -> None:
        if self.error is None:
            self.error = error
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(copy.copy(self.error))  # each is raised elsewhere
        self._unsent.clear()
        self._more.set()
