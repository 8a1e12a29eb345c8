"""Workers as child processes that speak frames over their standard input and output.

The environment's code runs there and nowhere else. A worker gets a small environment (no secrets, fixed hash
seed), a process group of its own, and a log file for what it prints.
"""

import asyncio
import contextlib
import math
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog

from opentinker_env_host.adapters import frames
from opentinker_env_host.adapters.frames import FrameReader
from opentinker_env_host.adapters.jails import JailedProgram
from opentinker_env_host.ports import (
    EnvironmentFacts,
    EnvironmentRaised,
    OptionsRefused,
    Reply,
    WorkerLost,
    WorkerTimedOut,
    WorkerUnusable,
)

log = structlog.get_logger()

PROGRAM = "opentinker.environments.worker"
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ")
_KEPT_LOGS = 20
_CALLS_A_FRAME = 256


@dataclass(slots=True)
class _Call:
    future: "asyncio.Future[Reply]"
    what: str
    timeout_s: float
    deadline: float = math.inf
    """Of the loop's clock; counts from when the worker gets to it."""


class ProcessWorker:
    """One worker process. Made by `ProcessLauncher`.

    Calls that are made in one turn of the event loop go to the worker in one frame. Where the environment is
    plain, the worker begins them in their order, as many at a time as it has threads (one, until it says that
    it started another because a step blocks): so the oldest that many are those that run, and the deadline of
    each counts from when it became one of them. `async` environments overlap all their calls; where one holds
    the event loop, the others are late for no fault of theirs, and it alone is timed.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        frames_in: FrameReader,
        hello: Mapping[str, Any],
        *,
        jailed: bool = False,
    ) -> None:
        self._name = name
        self._process = process
        self._frames_in = frames_in
        self._jailed = jailed
        self._at_once = math.inf if hello["concurrent"] else 1
        self._facts = EnvironmentFacts(
            description=str(hello["description"]),
            version=str(hello["version"]),
            max_turns=int(hello["max_turns"]),
            deterministic=bool(hello["deterministic"]),
            splits=tuple(hello["splits"]),
            agents=tuple(hello["agents"]),
            tools=tuple(hello["tools"]),
            run_timeout_s=float(hello["run_timeout_s"]),
            snapshots=str(hello["snapshots"]),
        )
        self._running: dict[int, _Call] = {}
        self._waiting: OrderedDict[int, _Call] = OrderedDict()
        self._held: set[int] = set()
        """Calls that hold their event loop."""
        self._held_since = 0.0
        self._unsent: list[Mapping[str, Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._next_id = 0
        self._killed_for = ""
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name=f"worker {name}")

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        """Process id, for tests and logs."""
        return self._process.pid

    @property
    def facts(self) -> EnvironmentFacts:
        return self._facts

    @property
    def alive(self) -> bool:
        return not self._ended.done() and not self._killed_for

    async def call(self, operation: str, timeout_s: float, **fields: Any) -> Reply:
        if not self.alive:
            raise WorkerLost(f"worker {self._name} is gone", suspect=False)
        loop = asyncio.get_running_loop()
        self._next_id += 1
        number = self._next_id
        call = _Call(loop.create_future(), operation, timeout_s)
        self._waiting[number] = call
        if not self._unsent:
            loop.call_soon(self._send)
        self._unsent.append({"id": number, "op": operation, **fields})
        self._begin_waiting()
        return await call.future

    def kill(self, why: str) -> None:
        if not self._killed_for:
            self._killed_for = why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def resident_bytes(self) -> int:
        try:
            process = psutil.Process(self._process.pid)
            # Of a jailed one this is the process that waits for it outside.
            counted = process.children(recursive=True) if self._jailed else [process]
            return sum(int(each.memory_info().rss) for each in counted)
        except psutil.Error:
            return 0

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        assert self._process.stdin is not None
        if self.alive:
            for start in range(0, len(unsent), _CALLS_A_FRAME):
                calls = unsent[start : start + _CALLS_A_FRAME]
                self._process.stdin.write(frames.encode({"calls": calls}))

    def _begin_waiting(self) -> None:
        """Let the deadlines begin of the calls that the worker has got to."""
        now = asyncio.get_running_loop().time()
        while self._waiting and len(self._running) < self._at_once:
            number, call = self._waiting.popitem(last=False)
            call.deadline = now + call.timeout_s
            self._running[number] = call
            if self._timer is None or call.deadline < self._timer.when():
                self._watch(call.deadline)

    def _watch(self, deadline: float) -> None:
        """Look at the deadlines then. One timer for all calls: most are answered before it goes off."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        timed = {number: self._running[number] for number in self._held & set(self._running)} or self._running
        late = {number: call for number, call in timed.items() if call.deadline <= now}
        for number, call in late.items():
            del self._running[number]
            text = f"the environment did not answer {call.what} within {call.timeout_s:g} s and was killed"
            if not call.future.done():
                call.future.set_exception(WorkerTimedOut(text))
        if late:
            self.kill(f"{next(iter(late.values())).what} timed out")
        elif timed:
            self._watch(min(call.deadline for call in timed.values()))

    def _hold(self, held: set[int]) -> None:
        """Others hold their event loop now than before: what waited behind those has that much more time."""
        now = asyncio.get_running_loop().time()
        if self._held:
            for number, call in self._running.items():
                if number not in self._held:
                    call.deadline += now - self._held_since
        self._held, self._held_since = held, now
        if self._running:
            self._watch(min(call.deadline for call in self._running.values()))

    async def _read(self) -> None:
        try:
            while arrived := await self._frames_in.read():
                for frame in arrived:
                    self._take(*frame)
        except Exception as error:  # a worker that was uploaded may say anything
            log.error("worker speaks nonsense", worker=self._name, error=repr(error)[:300])
            self.kill("it sent what is no frame")
        # Its output is closed: dead, dying, or broken beyond use.
        self.kill("its output ended")
        code = await self._process.wait()
        _close_pipes(self._process)
        if self._timer is not None:
            self._timer.cancel()
        how = self._how(code)
        died = self._killed_for == "its output ended"
        for call, suspect in (
            *((call, died) for call in self._running.values()),
            *((call, False) for call in self._waiting.values()),
        ):
            if not call.future.done():
                call.future.set_exception(WorkerLost(f"worker {self._name} {how}", suspect=suspect))
        self._running.clear()
        self._waiting.clear()
        self._ended.set_result(how)

    def _take(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        if "threads" in header:
            self._at_once = int(header["threads"])
            self._begin_waiting()
            return
        if "held" in header:
            self._hold(set(header["held"]))
            return
        call = self._running.pop(header["id"], None)
        if call is None:
            return
        if self._waiting:
            self._begin_waiting()
        if call.future.done():
            return
        error = header.get("error")
        if error is None:
            env_s = header["env_ns"] * 1e-9
            call.future.set_result(Reply(header["answer"], blobs, header["digest"], env_s))
        elif error["kind"] == "options":
            call.future.set_exception(OptionsRefused(error["text"]))
        else:
            call.future.set_exception(EnvironmentRaised(error["text"]))

    def _how(self, code: int) -> str:
        if self._killed_for and self._killed_for != "its output ended":
            return f"was killed: {self._killed_for}"
        if code < 0:
            return f"died of {signal.Signals(-code).name}"
        return f"exited with status {code}"


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """How to start the workers of one environment."""

    environment: str
    target: str
    path: tuple[Path, ...]
    python: Path
    log_dir: Path
    start_timeout_s: float
    threads: int | None = None
    """Most threads that play in one worker; None: as the worker does by itself."""
    memory_bytes: int = 0
    """What each process may allocate; 0: whatever there is."""
    jail: JailedProgram | None = None
    """How it runs in a jail, where `path` and `python` are those inside."""

    def command(self, module: str, *more: str) -> list[str]:
        """The command line of one of the client's programs for this environment."""
        words = [str(self.python), "-P", "-m", module, self.target, "--name", self.environment]
        for folder in self.path:
            words += ["--path", str(folder)]
        words += more
        return self.jail.wrap(words) if self.jail is not None else [*words, "--parent", str(os.getpid())]


class ProcessLauncher:
    """Starts workers of one environment."""

    def __init__(self, program: WorkerProgram) -> None:
        self._program = program
        self._started = 0

    async def start(self) -> ProcessWorker:
        program = self._program
        self._started += 1
        name = f"{program.environment}-{self._started}"
        log_path = self._log_path(name)
        more = [] if program.threads is None else ["--threads", str(program.threads)]
        if program.memory_bytes:
            more += ["--memory", str(program.memory_bytes)]
        arguments = program.command(PROGRAM, *more)
        with log_path.open("ab") as log_file:
            try:
                process = await asyncio.create_subprocess_exec(
                    *arguments,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log_file,
                    env=worker_environment(),
                    start_new_session=True,
                    limit=1 << 20,
                )
            except OSError as error:
                raise WorkerUnusable(f"{program.python}: {error.strerror}") from None
        assert process.stdout is not None
        frames_in = FrameReader(process.stdout)
        try:
            hello = await self._hello(frames_in, log_path)
            worker = ProcessWorker(name, process, frames_in, hello, jailed=program.jail is not None)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            _close_pipes(process)
            if isinstance(error, (ValueError, KeyError, TypeError)):
                raise WorkerUnusable(f"the worker said nonsense: {error!r:.200}") from None
            raise
        log.info("worker started", worker=name, pid=process.pid, log=str(log_path))
        return worker

    async def _hello(self, frames_in: FrameReader, log_path: Path) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(self._program.start_timeout_s):
                arrived = await frames_in.read()
        except TimeoutError:
            raise WorkerUnusable(
                f"{self._program.target} was not imported within {self._program.start_timeout_s:g} s"
            ) from None
        if not arrived:
            raise WorkerUnusable(f"the worker ended at once; its log {log_path} ends with: {_tail(log_path)}")
        header = arrived[0][0]
        if "unusable" in header:
            raise WorkerUnusable(str(header["unusable"]))
        hello: Mapping[str, Any] = header["hello"]
        return hello

    def _log_path(self, name: str) -> Path:
        """The worker's log; of the oldest ones some are deleted."""
        folder = self._program.log_dir
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob(f"{self._program.environment}-*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[:-_KEPT_LOGS]:
            path.unlink(missing_ok=True)
        return folder / f"{name}.log"


def worker_environment() -> dict[str, str]:
    """Environment variables of a worker: nothing secret, nothing random, one thread for numeric libraries."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return {**passed, **fixed}


def _close_pipes(process: Process) -> None:
    # asyncio closes them only when the garbage collector finds them, after the loop is gone perhaps.
    if process.stdin is not None:
        process.stdin.close()


def _tail(path: Path) -> str:
    text = path.read_text(errors="replace").strip()
    return text[-300:] or "(nothing)"
