"""Workers as child processes that speak frames over their standard input and output.

The environment's code runs there and nowhere else. A worker gets a small environment (no secrets, fixed hash
seed), a process group of its own, and a log file for what it prints.
"""

import asyncio
import contextlib
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


@dataclass(slots=True)
class _Call:
    future: "asyncio.Future[Reply]"
    what: str
    timeout_s: float
    timer: asyncio.TimerHandle | None = None


class ProcessWorker:
    """One worker process. Made by `ProcessLauncher`.

    Where the environment is plain, the worker answers in the order of the calls: the oldest one is the one
    that runs, and its deadline counts from when it became the oldest. `async` environments overlap their
    calls, and each deadline counts from its start.
    """

    def __init__(self, name: str, process: Process, hello: Mapping[str, Any]) -> None:
        self._name = name
        self._process = process
        self._overlapping = bool(hello["concurrent"])
        self._facts = EnvironmentFacts(
            description=str(hello["description"]),
            version=str(hello["version"]),
            max_turns=int(hello["max_turns"]),
            deterministic=bool(hello["deterministic"]),
            splits=tuple(hello["splits"]),
            agents=tuple(hello["agents"]),
            tools=tuple(hello["tools"]),
        )
        self._calls: OrderedDict[int, _Call] = OrderedDict()
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
        self._next_id += 1
        number = self._next_id
        call = _Call(asyncio.get_running_loop().create_future(), operation, timeout_s)
        self._calls[number] = call
        if self._overlapping or len(self._calls) == 1:
            self._arm(number)
        assert self._process.stdin is not None
        self._process.stdin.write(frames.encode({"id": number, "op": operation, **fields}))
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
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _arm(self, number: int) -> None:
        call = self._calls[number]
        loop = asyncio.get_running_loop()
        call.timer = loop.call_later(call.timeout_s, self._time_out, number)

    def _time_out(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        text = f"the environment did not answer {call.what} within {call.timeout_s:g} s and was killed"
        if not call.future.done():
            call.future.set_exception(WorkerTimedOut(text))
        self.kill(f"{call.what} timed out")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while (frame := await frames.read(self._process.stdout)) is not None:
                self._take(*frame)
        except (ValueError, KeyError) as error:
            log.error("worker speaks nonsense", worker=self._name, error=str(error))
            self.kill("it sent what is no frame")
        # Its output is closed: dead, dying, or broken beyond use.
        self.kill("its output ended")
        code = await self._process.wait()
        _close_pipes(self._process)
        how = self._how(code)
        oldest = next(iter(self._calls), 0)
        for number, call in self._calls.items():
            if call.timer is not None:
                call.timer.cancel()
            suspect = (self._overlapping or number == oldest) and self._killed_for == "its output ended"
            if not call.future.done():
                call.future.set_exception(WorkerLost(f"worker {self._name} {how}", suspect=suspect))
        self._calls.clear()
        self._ended.set_result(how)

    def _take(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        call = self._calls.pop(header["id"], None)
        if call is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        if not self._overlapping and self._calls:
            self._arm(next(iter(self._calls)))
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
        arguments = [str(program.python), "-P", "-m", PROGRAM, program.target, "--name", program.environment]
        for folder in program.path:
            arguments += ["--path", str(folder)]
        arguments += ["--parent", str(os.getpid())]
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
        try:
            hello = await self._hello(process, log_path)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            _close_pipes(process)
            raise
        log.info("worker started", worker=name, pid=process.pid, log=str(log_path))
        return ProcessWorker(name, process, hello)

    async def _hello(self, process: Process, log_path: Path) -> Mapping[str, Any]:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._program.start_timeout_s):
                frame = await frames.read(process.stdout)
        except TimeoutError:
            raise WorkerUnusable(
                f"{self._program.target} was not imported within {self._program.start_timeout_s:g} s"
            ) from None
        if frame is None:
            raise WorkerUnusable(f"the worker ended at once; its log {log_path} ends with: {_tail(log_path)}")
        if "unusable" in frame[0]:
            raise WorkerUnusable(str(frame[0]["unusable"]))
        hello: Mapping[str, Any] = frame[0]["hello"]
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
