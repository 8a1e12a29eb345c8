"""The deterministic engine: same seed, same bits, whatever else runs. Slow and exact; needs only torch."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from opentinker_inference.domain.sampling import (
    FIELDS,
    EngineInfo,
    SampleDone,
    SampleEvent,
    SampleJob,
    ScoreJob,
)
from opentinker_inference.engine.batching import Batcher
from opentinker_inference.engine.lora import LoraWeights, read_lora
from opentinker_inference.engine.model import DTYPES, DeterministicModel
from opentinker_inference.engine.selftest import find_quantum, linears_are_invisible
from opentinker_inference.engine.text import Text
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_DEFAULT_ROWS = 64
_DEFAULT_CACHE_BYTES = 4 << 30
_DEFAULT_VERSIONS = 8
_TOY_BYTES = 32 << 20
_UNSUPPORTED = {"json_schema"}

T = TypeVar("T")


class TransformersEngine:
    """Engine over `Batcher`. All computing happens in one thread; versions load between two steps."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._merged = config.serving_mode == "merged"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="deterministic")
        self._streams: dict[str, asyncio.Queue[SampleEvent | ServiceError]] = {}
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._model: DeterministicModel
        self._batcher: Batcher

    async def start(self) -> EngineInfo:
        dtype = self._config.dtype or "float32"
        if dtype not in DTYPES:
            allowed = ", ".join(sorted(DTYPES))
            raise ServiceError(
                Reason.UNSUPPORTED_OPTION, f"dtype {dtype!r} is not one of {allowed}", field="dtype"
            )
        threads = self._config.threads or _default_threads(self._config.model_dir)
        await self._in_thread(lambda: self._load_base(dtype, threads))
        self._loop_task = asyncio.create_task(self._run())
        return EngineInfo(
            engine="transformers",
            dtype=dtype,
            serving_mode="merged" if self._merged else "adapter",
            max_resident_versions=1
            if self._merged
            else self._config.max_resident_versions or _DEFAULT_VERSIONS,
            context_tokens=self._config.context_tokens,
            vocab_size=self._model.vocab_size,
            deterministic=True,
            sampling_fields=tuple(name for name in FIELDS if name not in _UNSUPPORTED),
            pid=os.getpid(),
            images=self._model.images,
        )

    async def sample(self, job: SampleJob) -> AsyncIterator[SampleEvent]:
        events: asyncio.Queue[SampleEvent | ServiceError] = asyncio.Queue()
        if job.request_id in self._streams:
            raise ServiceError(Reason.REQUEST_ID_REUSED, f"request {job.request_id} is running already")
        self._streams[job.request_id] = events
        try:
            await self._in_thread(lambda: self._submit(job))
            self._work.set()
            while True:
                event = await events.get()
                if isinstance(event, ServiceError):
                    raise event
                yield event
                if isinstance(event, SampleDone):
                    return
        finally:
            del self._streams[job.request_id]
            with contextlib.suppress(RuntimeError):  # the engine was closed meanwhile
                self._thread.submit(self._batcher.cancel, job.request_id)

    async def score(self, job: ScoreJob) -> list[list[float]]:
        return [
            await self._in_thread(lambda i=index: self._score(job, i))  # type: ignore[misc]
            for index in range(len(job.sequences))
        ]

    async def load(self, weights: Weights) -> float:
        started = time.monotonic()
        await self._in_thread(lambda: self._load(weights))
        return time.monotonic() - started

    async def unload(self, key: str) -> None:
        await self._in_thread(lambda: self._unload(key))

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # In the engine's thread

    def _load_base(self, dtype: str, threads: int) -> None:
        started = time.monotonic()
        self._model = DeterministicModel(self._config.model_dir, dtype, threads, self._merged)
        self._batcher = Batcher(
            self._model,
            Text(self._config.model_dir),
            max_rows=self._config.max_rows or _DEFAULT_ROWS,
            cache_bytes=self._config.kv_cache_bytes or _DEFAULT_CACHE_BYTES,
        )
        loaded = time.monotonic()
        self._model.pin_threads()
        self._batcher.quantum = find_quantum(self._model, self._config.max_rows or _DEFAULT_ROWS)
        if self._batcher.quantum == 0:
            log.warning("a row's bits depend on its batch on this machine; every completion runs alone")
        log.info(
            "engine started",
            threads=threads,
            dtype=dtype,
            batches_of=self._batcher.quantum,
            load_s=round(loaded - started, 2),
            self_test_s=round(time.monotonic() - loaded, 2),
        )

    def _submit(self, job: SampleJob) -> None:
        self._check_loaded(job.weights)
        self._batcher.submit(job)

    def _score(self, job: ScoreJob, index: int) -> list[float]:
        self._check_loaded(job.weights)
        images = job.images[index] if job.images else ()
        return self._model.prefill(job.weights, job.sequences[index], job.temperature, images)[2]

    def _load(self, weights: Weights) -> None:
        if self._model.has(weights.key):
            return
        if self._merged:
            self._batcher.forget(None)
        if weights.directory is None:
            self._model.load(weights.key, LoraWeights(0, ()))
            return
        if weights.full:
            self._model.load_full(weights.key, weights.directory)
            return
        adapter = read_lora(weights.directory)
        if not self._merged and self._batcher.quantum:
            rows = self._config.max_rows or _DEFAULT_ROWS
            shapes = {matrix.shape: matrix for m in adapter.modules for matrix in (m.lora_a, m.lora_b)}
            self._model.pin_threads()
            if not linears_are_invisible(shapes.values(), self._batcher.quantum, rows):
                log.warning("an adapter's bits depend on the batch here; every completion runs alone")
                self._batcher.quantum = 0
        self._model.load(weights.key, adapter)

    def _unload(self, key: str) -> None:
        self._batcher.forget(key)
        self._model.unload(key)

    def _check_loaded(self, key: str) -> None:
        if not self._model.has(key):
            raise ServiceError(
                Reason.VERSION_NOT_FOUND, f"weights {key or 'of the base model'} are not loaded"
            )

    # In the event loop

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._batcher.busy:
                try:
                    events = await self._in_thread(self._batcher.step)
                except Exception:
                    # The jobs share the engine's state, so none can go on: the child ends with this answer,
                    # the front restarts it and tries each job once more.
                    log.exception("a decoding step failed")
                    for waiting in self._streams.values():
                        waiting.put_nowait(ServiceError(Reason.ENGINE_CRASHED))
                    return
                for request_id, event in events:
                    stream = self._streams.get(request_id)
                    if stream is not None:
                        stream.put_nowait(event)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def run() -> T:
            if hasattr(self, "_model"):
                self._model.pin_threads()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


def _default_threads(model_dir: Path) -> int:
    """Every core for a real model; one for a toy, whose layers are shorter than waking a thread."""
    size_bytes = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return 1 if size_bytes < _TOY_BYTES else len(os.sched_getaffinity(0))
