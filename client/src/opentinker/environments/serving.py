"""How a worker process gets its calls played: plain environments by threads, `async` ones by an event loop.

Plain calls are begun in the order in which they came, by one thread, which is the process's main one. Only
when a step holds it up (it sleeps, waits for a server, or computes for long) is another thread started, so
that one episode's step does not hold up the others. The host is told of it, since a call's deadline counts
from when its turn has come. `async` calls overlap on one event loop, or on several where that is asked for;
of one that does not let go of its loop the host is told, so that its deadline ends it and not those that
wait behind it. Each answer is on its way before the next call begins: if that one kills the process, all
before it are answered.
"""

import asyncio
import itertools
import os
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO, Protocol

from opentinker.environments import frames
from opentinker.environments.runner import run_now

MAX_THREADS = 64
_LOOK_S = 0.005
_SLOW_S = 0.005
"""A thread is added where calls take longer than this while the processor is idle."""
_STUCK_LOOKS = 4
"""A thread is added where no call was begun in so many looks, whatever the processor does."""
_STACK_BYTES = 2 * 1024 * 1024
"""Of an added thread: it counts as memory that the worker took."""
_HELD_S = 0.2
"""A call that holds its loop for longer is told to the host."""
_IDLE_S = 10.0
"""After so long without a call an added thread ends."""

Call = Mapping[str, Any]
Answer = Callable[[Call], Coroutine[Any, Any, bytes]]
"""The frame that answers a call; never raises."""


class FrameSink(Protocol):
    """Where whole frames go, from any thread."""

    def write(self, data: bytes) -> None:
        """Write a frame."""
        ...


def serve_in_threads(answer: Answer, source: BinaryIO, sink: FrameSink, most: int = MAX_THREADS) -> None:
    """Play plain calls until the input ends, at most so many at a time."""
    _Players(answer, source, sink, most).serve()


def serve_overlapping(answer: Answer, source: BinaryIO, sink: FrameSink, most: int = 1) -> None:
    """Play `async` calls, all at once, until the input ends, on so many event loops at most."""
    asyncio.run(_Loops(answer, source, sink, most).serve())


class _Loops:
    """Event loops, the first of them in the main thread, and the thread that reads.

    More than one is for environments whose `async` methods block. An episode stays on the loop that it began
    on, since what it made there belongs to it.
    """

    def __init__(self, answer: Answer, source: BinaryIO, sink: FrameSink, most: int) -> None:
        self._answer = answer
        self._source = source
        self._sink = sink
        self._most = most
        self._loops: list[asyncio.AbstractEventLoop] = []
        self._places: dict[str, int] = {}
        self._episodes: list[int] = []
        self._running: set[asyncio.Task[None]] = set()
        self._holds: list[tuple[int, float] | None] = []
        """The call that each loop computes for right now, and since when."""

    async def serve(self) -> None:
        ended = asyncio.Event()
        first = asyncio.get_running_loop()
        self._add(first)

        def read() -> None:
            while (frame := frames.read(self._source)) is not None:
                for call in frame[0]["calls"]:
                    place = self._place(call)
                    self._loops[place].call_soon_threadsafe(self._start, place, call)
            first.call_soon_threadsafe(ended.set)

        threading.Thread(target=_or_exit(read), name="frames", daemon=True).start()
        threading.Thread(target=_or_exit(self._look_after), name="look after loops", daemon=True).start()
        await ended.wait()

    def _place(self, call: Call) -> int:
        """The loop of the call's episode. Called by the reading thread alone."""
        name = call.get("episode", "")
        if call["op"] == "begin" and name not in self._places:
            self._places[name] = place = self._freest()
            self._episodes[place] += 1
        place = self._places.get(name, 0)
        if call["op"] == "close" and self._places.pop(name, None) is not None:
            self._episodes[place] -= 1
        return place

    def _freest(self) -> int:
        place = self._episodes.index(min(self._episodes))
        if self._episodes[place] and len(self._loops) < self._most:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
            self._add(loop)
            return len(self._loops) - 1
        return place

    def _add(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loops.append(loop)
        self._episodes.append(0)
        self._holds.append(None)

    def _start(self, place: int, call: Call) -> None:
        task = self._loops[place].create_task(self._serve(place, call))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _look_after(self) -> None:
        told: list[int] = []
        while True:
            time.sleep(_HELD_S)
            before = time.monotonic() - _HELD_S
            held = [hold[0] for hold in tuple(self._holds) if hold is not None and hold[1] < before]
            if held != told:
                told = held
                self._sink.write(frames.encode({"held": held}))

    async def _serve(self, place: int, call: Call) -> None:
        try:
            frame = await self._noted(place, call["id"], self._answer(call))
        except BaseException as error:  # nothing that an environment raises may end the loop
            frame = _failed(call, error)
        self._sink.write(frame)

    @types.coroutine
    def _noted(self, place: int, number: int, work: Coroutine[Any, Any, bytes]) -> Generator[Any, Any, bytes]:
        """The work, with a note of when it computes and when it waits."""
        value: Any = None
        error: BaseException | None = None
        while True:
            self._holds[place] = (number, time.monotonic())
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration as stop:
                result: bytes = stop.value
                return result
            finally:
                self._holds[place] = None
            value = error = None
            try:
                value = yield awaited
            except BaseException as raised:
                error = raised


class _Players:
    """The threads that play, the one that reads, and the one that looks whether there are enough."""

    def __init__(self, answer: Answer, source: BinaryIO, sink: FrameSink, most: int) -> None:
        self._answer = answer
        self._source = source
        self._sink = sink
        self._most = most
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._begun = itertools.count()
        self._last_begun = 0
        self._arrived = threading.Event()
        self._lock = threading.Lock()
        self._threads = 1

    def serve(self) -> None:
        threading.Thread(target=_or_exit(self._read), name="frames", daemon=True).start()
        if self._most > 1:
            looking = threading.Thread(target=_or_exit(self._look_after), name="look after threads")
            looking.daemon = True
            looking.start()
        while (call := self._calls.get()) is not None:
            self._play(call)

    def _play(self, call: Call) -> None:
        self._last_begun = next(self._begun)
        try:
            frame = run_now(self._answer(call))
        except BaseException as error:  # sys.exit() too ends the episode that called it, and no thread
            frame = _failed(call, error)
        self._sink.write(frame)

    def _read(self) -> None:
        while (frame := frames.read(self._source)) is not None:
            for call in frame[0]["calls"]:
                self._calls.put(call)
            self._arrived.set()
        # The main thread ends with this, or is ended; the others are daemons.
        for _ in range(self._most):
            self._calls.put(None)

    def _look_after(self) -> None:
        while True:
            self._arrived.wait()
            self._arrived.clear()
            stuck = 0
            while True:
                begun, cpu, at = self._last_begun, time.process_time(), time.monotonic()
                time.sleep(_LOOK_S)
                if self._calls.empty():
                    break
                calls = self._last_begun - begun
                busy = time.process_time() - cpu
                past = time.monotonic() - at
                stuck = 0 if calls else stuck + 1
                slow = self._threads * past > _SLOW_S * calls and busy < past / 2
                if (slow or stuck >= _STUCK_LOOKS) and self._threads < self._most:
                    stuck = 0
                    self._add()

    def _add(self) -> None:
        with self._lock:
            self._threads += 1
            # Told first: the host must know when it sees what the thread answers.
            self._sink.write(frames.encode({"threads": self._threads}))
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._help, name="player", daemon=True).start()
        except RuntimeError:
            # There is no memory for another one; those that there are go on.
            self._most = self._threads - 1
            self._less()
        finally:
            threading.stack_size(usual)

    def _help(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                self._less()
                return
            if call is None:
                return
            self._play(call)

    def _less(self) -> None:
        with self._lock:
            self._threads -= 1
            self._sink.write(frames.encode({"threads": self._threads}))


def _failed(call: Call, error: BaseException) -> bytes:
    text = f"{type(error).__name__}: {error}"
    return frames.encode(
        {"id": call["id"], "error": {"kind": "raised", "text": text}, "digest": "", "env_ns": 0}
    )


def _or_exit(work: Callable[[], None]) -> Callable[[], None]:
    """The work of a thread without which the worker would only seem to live: what it raises, for want of
    memory above all, ends the process, and its episodes are played elsewhere.
    """

    def run() -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(70)

    return run
