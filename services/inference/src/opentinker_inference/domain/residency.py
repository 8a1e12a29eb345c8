"""Which weights are in the engine: loads on demand, evicts what nobody uses, never mixes versions.

Beside the base (adapter serving) many versions live at once; the least recently used one that no request uses
makes room. Merged into the base, one is resident: a request for another waits until those running are done,
then the engine swaps. Waiting requests are served in order of arrival, those of the same version together;
while one waits, newcomers of the resident version queue behind it, so that nobody starves. Where all who run
allow it, and who asks too, one version of a policy replaces another under those that run.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from opentinker_inference.domain.versions import BASE, LocalWeights, ModelRef
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

Hold = Callable[[ModelRef], AbstractAsyncContextManager[LocalWeights | None]]
"""Validated weights of a version on this host, kept while the block runs; None for the base model's."""
Load = Callable[[str, LocalWeights | None], Awaitable[float]]
Unload = Callable[[str], Awaitable[None]]


@dataclass(slots=True)
class _Entry:
    """One loaded version, or one being loaded."""

    ref: ModelRef
    users: int = 0
    last_used: int = 0
    ready: asyncio.Task[float] | None = None


@dataclass(slots=True)
class _Waiter:
    """A request that waits for a version to become the merged one."""

    ref: ModelRef
    may_continue: bool
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Residency:
    """Common face: `use` a version while a request runs, `load` it ahead, `unload` it when idle.

    `may_continue`: another version of the policy may replace this one meanwhile, and this one those of others
    that may continue too. Nothing is ever replaced where versions live beside each other.
    """

    @contextlib.asynccontextmanager
    async def use(self, ref: ModelRef, *, may_continue: bool = False) -> AsyncIterator[str]:
        """Have `ref` loaded while the block runs; gives its key. Waits where it must."""
        raise NotImplementedError
        yield

    async def load(self, ref: ModelRef, *, may_continue: bool = False) -> float:
        """Load `ref` ahead of use; seconds spent in the engine, 0 if it was loaded."""
        raise NotImplementedError

    async def unload(self, ref: ModelRef) -> None:
        """Forget `ref` once nobody uses it. VERSION_NOT_FOUND if it is not loaded."""
        raise NotImplementedError

    def loaded(self) -> list[tuple[ModelRef, int]]:
        """Versions in the engine and how many requests use each; the base model first."""
        raise NotImplementedError

    def waiting(self) -> int:
        """Requests that wait for a version."""
        raise NotImplementedError

    def reset(self) -> None:
        """The engine was restarted and knows only the base model."""
        raise NotImplementedError


class AdapterResidency(Residency):
    """Many versions at once, `capacity` of them at most."""

    def __init__(self, hold: Hold, load: Load, unload: Unload, capacity: int) -> None:
        self._hold = hold
        self._load = load
        self._unload = unload
        self._capacity = capacity
        self._entries: dict[str, _Entry] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Versions that the engine is being told to forget."""
        self._ticks = itertools.count(1)
        self._freed = asyncio.Condition()
        self._waiting = 0
        self._base_users = 0

    @contextlib.asynccontextmanager
    async def use(self, ref: ModelRef, *, may_continue: bool = False) -> AsyncIterator[str]:
        if ref.is_base:
            self._base_users += 1
            try:
                yield ""
            finally:
                self._base_users -= 1
            return
        entry = await self._entry(ref)
        entry.users += 1
        try:
            await self._loaded(entry)
            yield ref.key
        finally:
            entry.users -= 1
            async with self._freed:
                self._freed.notify_all()

    async def load(self, ref: ModelRef, *, may_continue: bool = False) -> float:
        known = ref.is_base or ref.key in self._entries
        async with self.use(ref):
            task = None if known else self._entries[ref.key].ready
            return task.result() if task is not None else 0.0

    async def unload(self, ref: ModelRef) -> None:
        entry = self._entries.get(ref.key)
        if entry is None:
            raise ServiceError(Reason.VERSION_NOT_FOUND, f"{ref} is not loaded", field="policy_version")
        async with self._freed:
            await self._freed.wait_for(lambda: entry.users == 0)
        await self._evict(entry)

    def loaded(self) -> list[tuple[ModelRef, int]]:
        ready = [e for e in self._entries.values() if e.ready is not None and _succeeded(e.ready)]
        return [(BASE, self._base_users), *((entry.ref, entry.users) for entry in ready)]

    def waiting(self) -> int:
        return self._waiting

    def reset(self) -> None:
        self._entries.clear()

    async def _entry(self, ref: ModelRef) -> _Entry:
        while True:
            entry = self._entries.get(ref.key)
            if entry is None and len(self._entries) < self._capacity:
                entry = self._entries[ref.key] = _Entry(ref)
            if entry is not None:
                entry.last_used = next(self._ticks)
                return entry
            idle = [e for e in self._entries.values() if e.users == 0]
            if idle:
                await self._evict(min(idle, key=lambda e: e.last_used))
                continue
            self._waiting += 1
            try:
                async with self._freed:
                    await self._freed.wait_for(
                        lambda: ref.key in self._entries or any(e.users == 0 for e in self._entries.values())
                    )
            finally:
                self._waiting -= 1

    async def _loaded(self, entry: _Entry) -> None:
        if entry.ready is None:
            # A task of its own: the request that asked first may be cancelled, others wait for the same.
            entry.ready = asyncio.create_task(self._fetch_and_load(entry.ref))
        try:
            await asyncio.shield(entry.ready)
        except Exception:
            if self._entries.get(entry.ref.key) is entry:
                del self._entries[entry.ref.key]
            raise

    async def _fetch_and_load(self, ref: ModelRef) -> float:
        if ref.key in self._leaving:
            # Loaded before it is forgotten, it would be forgotten after it is loaded.
            await asyncio.wait([self._leaving[ref.key]])
        async with self._hold(ref) as weights:
            return await self._load(ref.key, weights)

    async def _evict(self, entry: _Entry) -> None:
        if self._entries.get(entry.ref.key) is not entry:
            return
        key = entry.ref.key
        del self._entries[key]
        self._leaving[key] = task = asyncio.create_task(self._leave(entry))
        try:
            await asyncio.shield(task)
        finally:
            if self._leaving.get(key) is task and task.done():
                del self._leaving[key]

    async def _leave(self, entry: _Entry) -> None:
        if entry.ready is not None:  # whoever asked for it may have left before it was loaded
            await asyncio.gather(entry.ready, return_exceptions=True)
        await self._unload(entry.ref.key)


class MergedResidency(Residency):
    """One version at a time."""

    def __init__(self, hold: Hold, load: Load) -> None:
        self._hold = hold
        self._load = load
        self._resident: ModelRef | None = BASE
        self._users = 0
        self._pinned = 0
        """Users that must end under the version they named."""
        self._queue: list[_Waiter] = []
        self._swapping: asyncio.Task[None] | None = None
        self._last_load_s = 0.0

    @contextlib.asynccontextmanager
    async def use(self, ref: ModelRef, *, may_continue: bool = False) -> AsyncIterator[str]:
        self._refuse_second_policy(ref)
        waiter: _Waiter | None = None
        if self._resident is None or self._resident.key != ref.key or self._queue or self._swapping:
            # The files are checked, and brought here, while others still run.
            async with self._hold(ref):
                pass
            waiter = _Waiter(ref, may_continue)
            self._queue.append(waiter)
            self._advance()
            try:
                await waiter.turn
            except BaseException:
                if waiter in self._queue:
                    self._queue.remove(waiter)
                elif waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                    self._leave(may_continue)
                raise
        else:
            self._enter(may_continue)
        try:
            yield ref.key
        finally:
            self._leave(may_continue)

    async def load(self, ref: ModelRef, *, may_continue: bool = False) -> float:
        if self._resident is not None and self._resident.key == ref.key:
            return 0.0
        async with self.use(ref, may_continue=may_continue):
            return self._last_load_s

    async def unload(self, ref: ModelRef) -> None:
        if self._resident is None or self._resident.key != ref.key:
            raise ServiceError(Reason.VERSION_NOT_FOUND, f"{ref} is not loaded", field="policy_version")
        await self.load(BASE)

    def loaded(self) -> list[tuple[ModelRef, int]]:
        return [] if self._resident is None else [(self._resident, self._users)]

    def waiting(self) -> int:
        return len(self._queue)

    def reset(self) -> None:
        self._resident = BASE

    def _refuse_second_policy(self, ref: ModelRef) -> None:
        live = [waiter.ref for waiter in self._queue]
        if self._users and self._resident is not None:
            live.append(self._resident)
        other = next((r for r in live if r.policy and ref.policy and r.policy != ref.policy), None)
        if other is not None:
            raise ServiceError(
                Reason.MERGED_ONE_VERSION,
                f"this server merges one policy at a time and {other.policy} is being sampled; "
                f"use a second server for {ref.policy}, or serving_mode=adapter",
                field="model",
            )

    def _enter(self, may_continue: bool) -> None:
        self._users += 1
        self._pinned += not may_continue

    def _leave(self, may_continue: bool) -> None:
        self._users -= 1
        self._pinned -= not may_continue
        self._advance()

    def _advance(self) -> None:
        """Let in whoever can be: those of the resident version at the head, else swap once all are out."""
        if self._swapping is not None or not self._queue:
            return
        head = self._queue[0]
        if self._resident is not None and self._resident.key == head.ref.key:
            self._admit(head.ref)
        elif self._users == 0 or self._may_replace(head):
            self._swapping = asyncio.create_task(self._swap(head.ref))

    def _may_replace(self, head: _Waiter) -> bool:
        """Whether those that run go on under what `head` waits for. Spans name versions, so never across
        policies, nor to the base model.
        """
        same = self._resident is not None and self._resident.policy == head.ref.policy != ""
        return same and head.may_continue and not self._pinned

    def _admit(self, ref: ModelRef) -> None:
        going = [waiter for waiter in self._queue if waiter.ref.key == ref.key]
        self._queue = [waiter for waiter in self._queue if waiter.ref.key != ref.key]
        for waiter in going:
            if not waiter.turn.done():
                self._enter(waiter.may_continue)
                waiter.turn.set_result(None)

    async def _swap(self, ref: ModelRef) -> None:
        try:
            async with self._hold(ref) as weights:
                self._last_load_s = await self._load(ref.key, weights)
            self._resident = ref
        except Exception as error:
            going = [waiter for waiter in self._queue if waiter.ref.key == ref.key]
            self._queue = [waiter for waiter in self._queue if waiter.ref.key != ref.key]
            for waiter in going:
                if not waiter.turn.done():
                    waiter.turn.set_exception(error)
        finally:
            self._swapping = None
        if self._resident is not None and self._resident.key == ref.key:
            self._admit(ref)
        self._advance()


def _succeeded(task: "asyncio.Task[float]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
