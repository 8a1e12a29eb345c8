"""A job that is made when it is first needed: what serves a policy whose own job only trains."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeVar

from opentinker import errors
from opentinker.connection.jobs import Job, Link, Role

T = TypeVar("T")


class Slots(Protocol):
    """The way to the slots of a job; `Job` has it."""

    async def links(self, role: Role) -> list[Link]: ...

    def routed(
        self, role: Role, conversation: str = "", weight: int = 1
    ) -> AbstractAsyncContextManager[Link]: ...

    async def recover(self, failed: Link, error: errors.OpenTinkerError) -> None: ...

    async def through(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> T: ...

    async def everywhere(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> list[T]: ...

    def answered(self, link: Link | None = None) -> None: ...


class OnDemand:
    """The slots of a job that `make` makes at the first call. On the client's loop."""

    def __init__(self, make: Callable[[], Awaitable[Job]]) -> None:
        self._make = make
        self._making = asyncio.Lock()
        self._made: Job | None = None

    async def links(self, role: Role) -> list[Link]:
        """As `Job.links`."""
        return await (await self._job()).links(role)

    @contextlib.asynccontextmanager
    async def routed(self, role: Role, conversation: str = "", weight: int = 1) -> AsyncIterator[Link]:
        """As `Job.routed`."""
        async with (await self._job()).routed(role, conversation, weight) as link:
            yield link

    async def recover(self, failed: Link, error: errors.OpenTinkerError) -> None:
        """As `Job.recover`."""
        await (await self._job()).recover(failed, error)

    async def through(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> T:
        """As `Job.through`."""
        return await (await self._job()).through(role, call)

    async def everywhere(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> list[T]:
        """As `Job.everywhere`."""
        return await (await self._job()).everywhere(role, call)

    def answered(self, link: Link | None = None) -> None:
        """As `Job.answered`."""
        if self._made is not None:
            self._made.answered(link)

    async def _job(self) -> Job:
        async with self._making:
            if self._made is None:
                self._made = await self._make()
            return self._made
