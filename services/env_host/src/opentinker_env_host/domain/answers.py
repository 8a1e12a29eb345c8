"""Idempotent creation: the first answer to a request id is the answer to all its repetitions."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

KEPT_S = 3600.0

T = TypeVar("T")


class FirstAnswers(Generic[T]):
    """Answers by request id, for an hour. A failed first attempt is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[tuple[str, str], tuple[bytes, float, asyncio.Future[T]]] = OrderedDict()

    async def get(
        self, request_id: str, body: str, make: Callable[[], Awaitable[T]], *, scope: str = ""
    ) -> T:
        """The answer; `make` runs once. ServiceError REQUEST_ID_REUSED if the body is another one. The same
        id in another scope is another request.
        """
        key = (scope, request_id)
        now = self._clock.monotonic()
        while self._kept and next(iter(self._kept.values()))[1] < now - KEPT_S:
            self._kept.popitem(last=False)
        digest = hashlib.sha256(body.encode()).digest()
        if (kept := self._kept.get(key)) is not None:
            if kept[0] != digest:
                raise ServiceError(
                    Reason.REQUEST_ID_REUSED,
                    f"request_id {request_id!r} was used with another request",
                    field="request_id",
                )
            return await asyncio.shield(kept[2])
        future: asyncio.Future[T] = asyncio.ensure_future(make())
        self._kept[key] = (digest, now, future)
        try:
            return await asyncio.shield(future)
        finally:
            if future.done() and (future.cancelled() or future.exception() is not None):
                self._kept.pop(key, None)
