"""What all routes share: who calls, the body, streams that are written no faster than they are read."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from opentinker_gateway.application.asks import Ask
from opentinker_gateway.domain.book import TOKEN_PREFIX, Entry, EpisodeBook
from opentinker_gateway.domain.callers import Caller
from opentinker_gateway.wire.errors import HttpError, http_error
from opentinker_kit.auth import AuthPolicy
from opentinker_kit.errors import ServiceError, internal_error, new_error_id
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

T = TypeVar("T")
READ, USE = "http/read", "http/use"
"""The names under which the policy of keys knows this API: looking at models, and talking to them."""
_IDEMPOTENCY_KEY = "idempotency-key"
_RETRY_COUNT = "x-stainless-retry-count"
"""OpenAI's clients say with it how often they have made a call before."""
Message = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in."""

    auth: AuthPolicy
    book: EpisodeBook
    max_body_bytes: int

    async def caller(self, request: Request, access: str = USE) -> Caller:
        """Who calls. UNAUTHENTICATED without a key of the cluster, PERMISSION_DENIED for one that may only
        look.
        """
        header = request.headers.get("authorization", "")
        await self.auth.authorize(access, [("authorization", header)] if header else [])
        return Caller(header.partition(" ")[2].strip())

    async def entry(self, request: Request, identifier: str) -> Entry:
        """The episode, for its own key or its creator's. EPISODE_NOT_FOUND, UNAUTHENTICATED."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip().startswith(TOKEN_PREFIX):
            entry = self.book.opened_by(key.strip())
            if entry is None or entry.episode.id != identifier:
                raise ServiceError(
                    Reason.UNAUTHENTICATED, "the episode's key is wrong, or the episode is over"
                )
            return entry
        return self.book.get(identifier, await self.caller(request))

    async def body(self, request: Request) -> bytes:
        """The body. MESSAGE_TOO_LARGE, before all of it is read, if it is over the limit."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.max_body_bytes:
                text = f"the body may have {self.max_body_bytes} bytes"
                raise ServiceError(Reason.MESSAGE_TOO_LARGE, text)
        return bytes(data)


def ask_of(request: Request, caller: Caller, data: bytes, entry: Entry | None = None) -> Ask:
    """The call beside its body."""
    key = request.headers.get(_IDEMPOTENCY_KEY, "")[:256]
    retried = request.headers.get(_RETRY_COUNT, "0")
    return Ask(
        caller=caller,
        body_digest=hashlib.sha256(data).hexdigest(),
        idempotency_key=key,
        is_retry=bool(key) or (retried.isdigit() and int(retried) > 0),
        entry=entry,
    )


def error_response(error: ServiceError, *, chat: bool = False) -> Response:
    """The error as a response."""
    made = http_error(error, chat=chat)
    return JSONResponse(made.body, made.status, made.headers)


def explained(error: BaseException) -> ServiceError:
    """What a caller is told of any failure: of an unexpected one its id, under which it is logged."""
    if isinstance(error, ServiceError):
        return error
    error_id = new_error_id()
    log.error("a request failed unexpectedly", error_id=error_id, exc_info=error)
    return internal_error(error_id)


async def unless_left(request: Request, work: Awaitable[T]) -> T | None:
    """The result of the work; None, and the work is cancelled, if the client is gone before."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, leaving):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events. Each is made when the one before was taken; a client that takes none
    for too long is left, and what is made for it is cancelled.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_error: Callable[[BaseException], HttpError],
        write_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_error = on_error
        self._write_s = write_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            await unless_left(request, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Callable[[Message], Awaitable[None]]) -> None:
        async def write(message: Message) -> None:
            async with asyncio.timeout(self._write_s):
                await send(message)

        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await write(start)
            try:
                async for event in self._events:
                    await write({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                raise
            except Exception as error:
                # The status has been sent: an event tells it, as OpenAI's clients expect.
                event = self._on_error(error).event()
                await write({"type": "http.response.body", "body": event, "more_body": True})
            await write({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            log.info("a client stopped reading its stream")
