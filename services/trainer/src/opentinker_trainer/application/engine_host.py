"""Keeps an engine alive: starts it, notices its end, starts the next one."""

import asyncio
from collections.abc import Callable

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_trainer.ports import Engine, ModelInfo
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_RESTART_S = 0.2
_MAX_LOAD_CRASHES = 3


class EngineHost:
    """The current engine. Use from one event loop."""

    def __init__(self, make: Callable[[], Engine], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._engine: Engine | None = None
        self._starting = asyncio.Lock()
        self.model: ModelInfo | None = None
        """The loaded model, once there is one; the same after every restart."""
        self.restarts = -1

    async def engine(self) -> Engine:
        """An engine that has loaded its model, started if need be. ServiceError if it cannot load."""
        async with self._starting:
            crashes = 0
            while self._engine is None or self._engine.exited.done():
                engine = self._make()
                try:
                    self.model = await engine.start()
                except ServiceError as error:
                    await engine.close()
                    crashes += 1
                    if error.reason is not Reason.ENGINE_CRASHED or crashes >= _MAX_LOAD_CRASHES:
                        raise
                    log.warning("the engine died while loading", crashes=crashes, error=error.message)
                    await self._clock.sleep(_RESTART_S)
                    continue
                self._engine = engine
                self.restarts += 1
                log.info("engine ready", restarts=self.restarts)
            return self._engine

    def current(self) -> Engine:
        """The engine that runs now. SERVER_STARTING or ENGINE_CRASHED if there is none."""
        if self._engine is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        if self._engine.exited.done():
            raise ServiceError(Reason.ENGINE_CRASHED, retry_after_s=1.0)
        return self._engine

    async def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            await self._engine.close()
