"""Engine children: a process that runs torch or vLLM behind a front that never imports them.

Front and child share a Unix socket pair. Each message on it is an `opentinkerapi.engine.v1.Frame`, preceded
by its length as 4 bytes little-endian. The front calls methods; a call has one answer, or a stream of answers
and an end. Typed errors cross unchanged; any other exception in the child becomes INTERNAL with an error id
and its traceback in the child's log.

Neither outlives the other by accident: the child leads its own process group and kills it when the socket
closes (a thread of its own watches, so a busy event loop or a long kernel does not matter); when the child
dies, every call under way fails with ENGINE_CRASHED.

Front side:  `engine = EngineProcess(argv, log_path=…)`, `await engine.start()`, `await engine.call(…)`.
Child side:  `EngineServer({"Forward": Handler(ForwardCall, forward)}).run()`.
"""

import asyncio
import contextlib
import inspect
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from opentinker_kit.errors import ServiceError, internal_error, new_error_id
from opentinker_kit.lifeline import exit_at_eof
from opentinker_kit.logging import configure
from opentinkerapi.engine.v1 import frame_pb2
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

FD_VARIABLE = "OPENTINKER_ENGINE_FD"
LIFELINE_VARIABLE = "OPENTINKER_LIFELINE_FD"
MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct("<I")
_FLUSH_S = 2.0
_BURST = 16
"""Frames that are taken in before everything else on the event loop has its turn."""

ResponseT = TypeVar("ResponseT", bound=Message)


async def read_frame(reader: asyncio.StreamReader) -> frame_pb2.Frame | None:
    """The next frame, or None at the end. ServiceError INTERNAL if the bytes make no sense."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ServiceError(Reason.INTERNAL, f"a frame of {length} bytes is over {MAX_FRAME_BYTES}")
        return frame_pb2.Frame.FromString(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except DecodeError as error:
        raise ServiceError(Reason.INTERNAL, "a frame cannot be read") from error


def write_frame(writer: asyncio.StreamWriter, frame: frame_pb2.Frame) -> None:
    """Queue a frame; drain the writer afterwards."""
    data = frame.SerializeToString()
    if len(data) > MAX_FRAME_BYTES:
        raise ServiceError(
            Reason.MESSAGE_TOO_LARGE, f"a frame of {len(data)} bytes is over {MAX_FRAME_BYTES}"
        )
    writer.write(_LENGTH.pack(len(data)))
    writer.write(data)


class EngineProcess:
    """The front's side: starts the child, calls it, knows when it is gone. One use; make a new one to
    restart.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log_path: Path,
        lifeline_fd: int | None = None,
    ) -> None:
        """`env` is added to this process's environment; what the child prints goes to `log_path`."""
        self._argv = list(argv)
        self._env = dict(env or {})
        self._log_path = log_path
        self._lifeline_fd = lifeline_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._calls: dict[int, asyncio.Queue[frame_pb2.Frame | None]] = {}
        self._next_id = 1
        self._tasks: list[asyncio.Task[None]] = []
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Set to the child's exit status (negative: the signal) when it is gone and its socket is drained."""

    @property
    def pid(self) -> int:
        """The child's process id, which is its process group's too."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the child was started and is not known to be gone."""
        return self._process is not None and not self.exited.done()

    async def start(self) -> None:
        """Start the child. OSError if the program cannot be run."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        passed = [theirs.fileno()]
        env = {**os.environ, **self._env, FD_VARIABLE: str(theirs.fileno())}
        env.pop(LIFELINE_VARIABLE, None)
        if self._lifeline_fd is not None:
            passed.append(self._lifeline_fd)
            env[LIFELINE_VARIABLE] = str(self._lifeline_fd)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log_path.open("ab") as output, theirs:
                self._process = subprocess.Popen(  # noqa: ASYNC220 (fork and exec take a millisecond)
                    self._argv,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=passed,
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._tasks = [asyncio.create_task(self._receive())]

    async def call(self, method: str, request: Message, response_type: type[ResponseT]) -> ResponseT:
        """Call a method that has one answer. ServiceError as raised in the child, or ENGINE_CRASHED."""
        answer: ResponseT | None = None
        async with contextlib.aclosing(self._exchange(method, request)) as bodies:
            async for body in bodies:
                answer = response_type.FromString(body)
        if answer is None:
            raise ServiceError(Reason.INTERNAL, f"the engine answered {method} with nothing")
        return answer

    async def stream(
        self, method: str, request: Message, response_type: type[ResponseT]
    ) -> AsyncIterator[ResponseT]:
        """Call a method that has many answers. Leaving the iteration early cancels the call in the child."""
        async with contextlib.aclosing(self._exchange(method, request)) as bodies:
            async for body in bodies:
                yield response_type.FromString(body)

    def kill(self) -> None:
        """Kill the child and everything in its process group, now. Calls under way fail with
        ENGINE_CRASHED.
        """
        if self._process is not None and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the child and wait until it is gone."""
        self.kill()
        if self._process is not None:
            await asyncio.shield(self.exited)

    def log_tail(self, limit_bytes: int = 4000) -> str:
        """The end of what the child printed."""
        with contextlib.suppress(OSError), self._log_path.open("rb") as file:
            file.seek(max(0, self._log_path.stat().st_size - limit_bytes))
            return file.read().decode(errors="replace")
        return ""

    async def _exchange(self, method: str, request: Message) -> AsyncGenerator[bytes, None]:
        if not self.alive or self._writer is None:
            raise self._crashed()
        call_id, self._next_id = self._next_id, self._next_id + 1
        answers: asyncio.Queue[frame_pb2.Frame | None] = asyncio.Queue()
        self._calls[call_id] = answers
        ended = False
        try:
            await self._send(
                frame_pb2.Frame(call_id=call_id, method=method, body=request.SerializeToString())
            )
            while True:
                frame = await answers.get()
                if frame is None:
                    ended = True
                    raise self._crashed()
                if frame.HasField("error"):
                    ended = True
                    raise ServiceError.from_status(frame.error)
                if frame.body or not frame.end:
                    yield frame.body
                if frame.end:
                    ended = True
                    return
        finally:
            del self._calls[call_id]
            if not ended and self.alive:
                write_frame(self._writer, frame_pb2.Frame(call_id=call_id, cancel=True))

    async def _send(self, frame: frame_pb2.Frame) -> None:
        assert self._writer is not None
        write_frame(self._writer, frame)
        with contextlib.suppress(ConnectionError):  # the receiving side notices, and fails the call
            await self._writer.drain()

    async def _receive(self) -> None:
        assert self._reader is not None
        assert self._writer is not None
        try:
            taken = 0
            while (frame := await read_frame(self._reader)) is not None:
                if (answers := self._calls.get(frame.call_id)) is not None:
                    answers.put_nowait(frame)
                taken += 1
                if taken % _BURST == 0:
                    # What is in the buffer already would be read without a pause: a thousand tokens that come
                    # at once must not keep a question about the server's health waiting.
                    await asyncio.sleep(0)
        except ServiceError:
            log.exception("the engine sent what cannot be read")
        finally:
            # Without its socket the child is of no use, whatever it still does.
            self.kill()
            assert self._process is not None
            status = await asyncio.to_thread(self._process.wait)
            self._writer.close()
            self.exited.set_result(status)
            for answers in self._calls.values():
                answers.put_nowait(None)

    def _crashed(self) -> ServiceError:
        status = self.exited.result() if self.exited.done() and not self.exited.cancelled() else None
        metadata = {} if status is None else {"exit_status": status}
        return ServiceError(Reason.ENGINE_CRASHED, retry_after_s=1.0, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Handler:
    """A method of an engine: the type of its request, and what runs.

    `run` takes the parsed request. It is a coroutine function (runs beside others), an async generator
    function (answers a stream), or a plain function (runs in the engine's one worker thread, in order of
    arrival).
    """

    request_type: type[Message]
    run: Callable[[Any], Any]


class EngineServer:
    """The child's side: serves its handlers on the inherited socket until that closes."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.StreamWriter] | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    def run(self) -> None:
        """Serve until the front closes the socket or dies; then this process group is killed. Never
        returns.
        """
        configure(service="engine")
        guard_engine()
        asyncio.run(self.serve())
        end_engine()

    async def serve(self) -> None:
        """Serve until the socket closes; for engines that run an event loop of their own."""
        connection = socket.socket(fileno=engine_fd())
        reader, writer = await asyncio.open_connection(sock=connection)
        self._serving = asyncio.get_running_loop(), writer
        while (frame := await read_frame(reader)) is not None:
            if frame.cancel:
                if (task := self._running.get(frame.call_id)) is not None:
                    task.cancel()
                continue
            task = asyncio.create_task(self._answer(frame, writer))
            self._running[frame.call_id] = task
            task.add_done_callback(partial(self._forget, frame.call_id))

    def abort(self, error: ServiceError) -> None:
        """Answer every call under way with an error, then end this process and all that it started. For
        engines that cannot go on and know why; may be called from any thread.
        """
        log.error("the engine ends", reason=error.reason, error=error.message)
        if self._serving is None:
            end_engine()
            return
        loop, writer = self._serving
        asyncio.run_coroutine_threadsafe(self._abort(writer, error), loop)

    async def _abort(self, writer: asyncio.StreamWriter, error: ServiceError) -> None:
        for call_id in list(self._running):
            write_frame(writer, frame_pb2.Frame(call_id=call_id, end=True, error=error.to_status()))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        end_engine()

    def _forget(self, call_id: int, task: asyncio.Task[None]) -> None:
        self._running.pop(call_id, None)

    async def _answer(self, frame: frame_pb2.Frame, writer: asyncio.StreamWriter) -> None:
        end = frame_pb2.Frame(call_id=frame.call_id, end=True)
        try:
            await self._dispatch(frame, writer, end)
        except ServiceError as error:
            end.error.CopyFrom(error.to_status())
        except asyncio.CancelledError:
            end.error.CopyFrom(ServiceError(Reason.CANCELLED).to_status())
        except Exception:
            error_id = new_error_id()
            log.exception("engine call failed unexpectedly", method=frame.method, error_id=error_id)
            end.error.CopyFrom(internal_error(error_id).to_status())
        write_frame(writer, end)
        with contextlib.suppress(ConnectionError):
            await writer.drain()

    async def _dispatch(
        self, frame: frame_pb2.Frame, writer: asyncio.StreamWriter, end: frame_pb2.Frame
    ) -> None:
        handler = self._handlers.get(frame.method)
        if handler is None:
            raise ServiceError(Reason.UNIMPLEMENTED, f"the engine has no method {frame.method!r}")
        request = handler.request_type.FromString(frame.body)
        if inspect.isasyncgenfunction(handler.run):
            async with contextlib.aclosing(handler.run(request)) as responses:
                async for response in responses:
                    body = response.SerializeToString()
                    write_frame(writer, frame_pb2.Frame(call_id=frame.call_id, body=body))
                    await writer.drain()
            return
        if inspect.iscoroutinefunction(handler.run):
            answer: Awaitable[Message] = handler.run(request)
        else:
            answer = asyncio.get_running_loop().run_in_executor(self._worker, handler.run, request)
        body = (await answer).SerializeToString()
        write_frame(writer, frame_pb2.Frame(call_id=frame.call_id, body=body))


def engine_fd() -> int:
    """The inherited socket of an engine child. SystemExit outside one."""
    value = os.environ.get(FD_VARIABLE)
    if value is None:
        sys.exit(f"{FD_VARIABLE} is not set: an engine is started by its server, not by hand")
    return int(value)


def guard_engine() -> None:
    """Have this process group end when the front does: by its socket, and by the lifeline where there is
    one.
    """
    threading.Thread(target=_watch_front, args=(engine_fd(),), name="front", daemon=True).start()
    lifeline = os.environ.get(LIFELINE_VARIABLE)
    if lifeline is not None:
        exit_at_eof(int(lifeline))


def _watch_front(fd: int) -> None:
    # Only the hang-up is asked for: the frames are the event loop's to read.
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    end_engine()


def end_engine() -> None:
    """Kill this process and all that it started, at once."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(70)
