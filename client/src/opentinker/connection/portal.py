"""The client's own event loop, so that its objects work from any thread and under any other loop.

All network work of the client runs on one loop in one daemon thread. Public coroutines hop onto it:
`bridge` from a coroutine of whatever loop (a notebook's, an application's), `run` from plain blocking code.
A coroutine that is on the loop already runs in place, so `fit()` can be written with the same calls that a
user makes.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

INTERRUPT_PATIENCE_S = 10.0


class Portal:
    """One event loop in one thread. Not started until `start`; `close` ends what still runs on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None

    @classmethod
    def here(cls) -> Self:
        """A portal onto the loop that runs now, without a thread: `bridge` works in place, `run` does not."""
        portal = cls.__new__(cls)
        portal._loop = asyncio.get_running_loop()
        portal._thread = None
        return portal

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop."""
        return self._loop

    @property
    def inside(self) -> bool:
        """Whether the caller is on the loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def start(self) -> Self:
        """Start the thread."""
        ready = threading.Event()

        def work() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.call_soon(ready.set)
            self._loop.run_forever()

        self._thread = threading.Thread(target=work, name="opentinker", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and block until it ends; Ctrl-C cancels it and waits for its clean-up.

        RuntimeError when called on the loop itself, which would wait for itself for ever.
        """
        if self.inside:
            coroutine.close()
            raise RuntimeError(
                "a blocking call inside a coroutine of the client; await its async form instead"
            )
        ended = threading.Event()

        async def work() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                # What it does on its way out (say that the run failed, for example) must not hold up Ctrl-C
                # long.
                ended.wait(timeout=INTERRUPT_PATIENCE_S)
            raise

    async def bridge(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop from a coroutine of any loop; cancelling the caller cancels it."""
        if self.inside:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def relay(self, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """What a generator of the loop yields, on any loop; it is closed with this one."""

        async def pull() -> tuple[T, ...]:
            async for item in source:
                return (item,)
            return ()

        try:
            while found := await self.bridge(pull()):
                yield found[0]
        finally:
            await self.bridge(source.aclose())

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a plain function on the loop, soon; in place when the caller is on it. Keeps the caller's
        order.
        """
        if self.inside:
            function(*arguments)
        else:
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel what still runs, stop the loop, end the thread."""
        if self._thread is None or self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_rest(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()

    @staticmethod
    async def _cancel_rest() -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Pending(Generic[T]):
    """Something under way on the client's loop: await it from any loop, or block on `result()`.

    A caller who stops waiting leaves work that was submitted (`keeps_on`) alone, and cancels any other.
    """

    def __init__(self, portal: Portal, future: "asyncio.Future[T]", *, keeps_on: bool = False) -> None:
        self._portal = portal
        self._future = future
        self._keeps_on = keeps_on
        self.retrieved = False
        """Whether somebody has been given the outcome."""

    @classmethod
    def of(cls, portal: Portal, coroutine: Coroutine[Any, Any, T]) -> "Pending[T]":
        """Start a coroutine on the loop now."""
        future: asyncio.Future[T] = portal.loop.create_future()
        pending = cls(portal, future)

        def start() -> None:
            task = portal.loop.create_task(coroutine)
            task.add_done_callback(lambda done: _copy(done, future))
            future.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)

        portal.call(start)
        return pending

    def __await__(self) -> Generator[Any, None, T]:
        return self._portal.bridge(self._wait()).__await__()

    def result(self) -> T:
        """Block until it ends."""
        return self._portal.run(self._wait())

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is under way and where it did not."""
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()

    async def _wait(self) -> T:
        try:
            return await (asyncio.shield(self._future) if self._keeps_on else self._future)
        finally:
            self.retrieved = self._future.done()


def _copy(task: "asyncio.Task[T]", future: "asyncio.Future[T]") -> None:
    if future.done():
        return
    if task.cancelled():
        future.cancel()
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
