"""The program that env_host starts for each worker: `python -m opentinker.environments.worker module:Class`.

It holds many episodes of one environment class and answers frames (see `frames`) from standard input on its
original standard output; what the environment prints goes to standard error, the worker's log. How calls
follow each other is in `serving`. It ends when its input ends, and the kernel ends it when its host dies,
even in the middle of an endless loop.

Request: {"calls": [{"id", "op", "episode", ...}, ...]}. Answer, one for each call: {"id", "answer" | "error",
"digest", "env_ns"}. {"threads": n}: from now on n calls run at a time.
"""

import argparse
import contextlib
import ctypes
import importlib
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, BinaryIO

from opentinker.environments import codec, frames
from opentinker.environments.base import (
    EnvironmentClass,
    check_class,
    describe,
    has_snapshots,
    is_async,
    make,
)
from opentinker.environments.content import plain_json
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.runner import EnvironmentRaised, Runner
from opentinker.environments.serving import MAX_THREADS, serve_in_threads, serve_overlapping
from opentinker.environments.targets import Target

Answer = tuple[dict[str, Any], list[bytes]]
MAX_ANSWER_BYTES = 15 * 1024 * 1024
"""What still fits into a message of the host's, with room for what it adds."""
_PR_SET_PDEATHSIG = 1


class Worker:
    """The episodes of one class in this process."""

    def __init__(self, cls: EnvironmentClass, name: str) -> None:
        self._cls = cls
        self.info = describe(cls, name)
        self.concurrent = is_async(cls)
        self._episodes: dict[str, Runner] = {}
        self._operations: dict[str, Callable[[Mapping[str, Any]], Awaitable[Answer]]] = {
            "begin": self._begin,
            "step": self._step,
            "finalize": self._finalize,
            "close": self._close,
            "check": self._check,
            "tasks": self._tasks,
            "snapshot": self._snapshot,
            "fork": self._fork,
            "drop": self._drop,
        }
        self._snapshots: dict[str, Runner] = {}

    async def answer(self, request: Mapping[str, Any]) -> bytes:
        """The frame that answers a request; never raises."""
        started = time.perf_counter_ns()
        header: dict[str, Any] = {"id": request["id"]}
        blobs: list[bytes] = []
        try:
            header["answer"], blobs = await self._operations[request["op"]](request)
            header["digest"] = codec.digest(header["answer"], blobs)
            header["env_ns"] = time.perf_counter_ns() - started
            frame = frames.encode(header, blobs)
            if len(frame) <= MAX_ANSWER_BYTES:
                return frame
            text = f"an answer of {len(frame)} bytes is over the {MAX_ANSWER_BYTES} that travel"
            header["error"] = {"kind": "raised", "text": text}
        except EnvironmentRaised as raised:
            sys.stderr.write(raised.trace)
            header["error"] = {"kind": "raised", "text": raised.text}
        except (InvalidOptions, EnvironmentDefinitionError) as error:
            header["error"] = {"kind": "options", "text": str(error)}
        except Exception as error:
            traceback.print_exc()
            header["error"] = {"kind": "raised", "text": f"{type(error).__name__}: {error}"}
        failed = {"id": request["id"], "error": header["error"], "digest": ""}
        return frames.encode({**failed, "env_ns": time.perf_counter_ns() - started})

    async def _begin(self, request: Mapping[str, Any]) -> Answer:
        runner = Runner(self._cls, request["options"])
        self._episodes[request["episode"]] = runner
        observations = await runner.begin(request["seed"], request["task"])
        blobs: list[bytes] = []
        return {"observations": codec.plain_observations(observations, blobs)}, blobs

    async def _step(self, request: Mapping[str, Any]) -> Answer:
        blobs: list[bytes] = []
        result = await self._episodes[request["episode"]].step(codec.read_actions(request["action"]))
        return codec.plain_step(result, blobs), blobs

    async def _finalize(self, request: Mapping[str, Any]) -> Answer:
        return codec.plain_result(await self._episodes[request["episode"]].finalize()), []

    async def _close(self, request: Mapping[str, Any]) -> Answer:
        runner = self._episodes.pop(request["episode"], None)
        if runner is not None:
            await runner.close()
        return {}, []

    async def _snapshot(self, request: Mapping[str, Any]) -> Answer:
        """Native, else a copy that stays here, else none: then the host has the episode played again."""
        runner = self._episodes[request["episode"]]
        why = ""
        if has_snapshots(self._cls):
            try:
                return {"kind": "NATIVE", "state": await runner.state()}, []
            except EnvironmentRaised as raised:
                sys.stderr.write(raised.trace)
                why = raised.text
        elif self._cls.copyable and request["copy"]:
            try:
                self._snapshots[request["snapshot"]] = runner.copy()
                return {"kind": "COPY"}, []
            except Exception as error:
                why = f"it cannot be copied: {type(error).__name__}: {error}"
        return {"kind": "", "why": why}, []

    async def _fork(self, request: Mapping[str, Any]) -> Answer:
        if request["state"] is not None:
            runner = Runner(self._cls, request["options"])
            await runner.go_on_from(request["state"])
        else:
            runner = self._snapshots[request["snapshot"]].copy()
        former = self._episodes.pop(request["episode"], None)
        self._episodes[request["episode"]] = runner
        if former is not None:
            await former.close()
        return {}, []

    async def _drop(self, request: Mapping[str, Any]) -> Answer:
        self._snapshots.pop(request["snapshot"], None)
        return {}, []

    async def _check(self, request: Mapping[str, Any]) -> Answer:
        # Making one finds what the signature does not say: a value out of range.
        try:
            make(self._cls, request["options"])
        except ValueError as error:
            raise InvalidOptions(str(error)) from None
        return {}, []

    async def _tasks(self, request: Mapping[str, Any]) -> Answer:
        tasks = make(self._cls, request["options"]).tasks(request["split"])
        if tasks is None:
            return {"tasks": None, "total": 0}, []
        start, stop = request["offset"], min(request["offset"] + request["limit"], len(tasks))
        page = [plain_json(tasks[index], f"task {index}") for index in range(start, stop)]
        return {"tasks": page, "total": len(tasks)}, []


def main(argv: list[str] | None = None) -> int:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", help="module:Class")
    parser.add_argument("--name", default="", help="the name it is hosted under")
    parser.add_argument("--path", action="append", default=[], help="folder to find the module in")
    parser.add_argument("--threads", type=int, default=0, help="most threads that play; 0: by itself")
    parser.add_argument("--memory", type=int, default=0, help="bytes that it may take; 0: any")
    parser.add_argument("--parent", type=int, default=0, help="process id of the host")
    arguments = parser.parse_args(argv)
    source, sink = take_standard_streams()
    die_with(arguments.parent)
    _bound_memory(arguments.memory)
    try:
        worker = Worker(load(arguments.target, arguments.path), arguments.name)
    except Exception as error:
        traceback.print_exc()
        sink.write(frames.encode({"unusable": f"{type(error).__name__}: {error}"}))
        return 1
    info = worker.info
    hello = {
        "name": info.name,
        "description": info.description,
        "version": info.version,
        "max_turns": info.max_turns,
        "deterministic": info.deterministic,
        "splits": list(info.splits),
        "agents": list(info.agents),
        "tools": list(info.tools),
        "run_timeout_s": info.run_timeout_s,
        "snapshots": info.snapshots,
        "concurrent": worker.concurrent,
    }
    sink.write(frames.encode({"hello": hello}))
    if worker.concurrent:
        serve_overlapping(worker.answer, source, sink, arguments.threads or 1)
    else:
        serve_in_threads(worker.answer, source, sink, arguments.threads or MAX_THREADS)
    return 0


def load(target: str, path: list[str]) -> EnvironmentClass:
    """The class that `module:Class` names, or `module:function(literals)` makes. EnvironmentDefinitionError,
    ImportError.
    """
    named = Target.read(target)
    sys.path[:0] = path
    value = named.made_of(importlib.import_module(named.module))
    check_class(value)
    cls: EnvironmentClass = value
    return cls


def take_standard_streams() -> tuple[BinaryIO, "Sink"]:
    """The pipe to the host, out of reach of what the environment prints or reads."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    writer = Sink(sink)

    def leave() -> None:
        # A fork that the environment makes is not the worker: it must answer nothing, and the pipes must end
        # when the worker does.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (source.fileno(), sink):
            os.dup2(null, fd)
        os.close(null)
        writer.left = True

    os.register_at_fork(after_in_child=leave)
    return source, writer


class Sink:
    """Writes whole frames to a pipe, whose `write` may take less than it is given. Any thread may."""

    def __init__(self, fd: int) -> None:
        self.left = False
        """This process is a fork of the worker."""
        self._fd = fd
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        if self.left:
            os._exit(0)
        view = memoryview(data)
        try:
            with self._lock:
                while view:
                    view = view[os.write(self._fd, view) :]
        except BrokenPipeError:
            # The host is gone; so is everyone who could be told.
            os._exit(0)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its host dies, whatever the environment is doing."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def _bound_memory(most: int) -> None:
    """A limit on what this process may allocate: whoever asks for more gets a MemoryError. Where the machine
    itself has none left, the kernel is to take a worker and not its host.
    """
    if most:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    if sys.platform == "linux":
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")


if __name__ == "__main__":
    sys.exit(main())
