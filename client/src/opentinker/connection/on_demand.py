"""A job that is made when it is first needed: what serves a policy whose own job only trains."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from opentinker import errors
from opentinker.connection.jobs import Job, Link, Role

T = TypeVar("T")


class Slots(Protocol):
    """The way to the slots of a job; `Job` has it."""

    async def link(self, role: Role) -> Link: ...

    async def recover(self, failed: Link, error: errors.OpenTinkerError) -> None: ...

    async def through(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> T: ...

    def answered(self) -> None: ...


class OnDemand:
    """The slots of a job that `make` makes at the first call. On the client's loop."""

    def __init__(self, make: Callable[[], Awaitable[Job]]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._made: Job | None = None

    async def link(self, role: Role) -> Link:
        """As `Job.link`."""
        return await (await self._job()).link(role)

    async def recover(self, failed: Link, error: errors.OpenTinkerError) -> None:
        """As `Job.recover`."""
        await (await self._job()).recover(failed, error)

    async def through(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> T:
        """As `Job.through`."""
        return await (await self._job()).through(role, call)

    def answered(self) -> None:
        """As `Job.answered`."""
        if self._made is not None:
            self._made.answered()

    async def _job(self) -> Job:
        async with self._making:
            if self._made is None:
                self._made = await self._make()
            return self._made
