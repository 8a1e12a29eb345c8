"""A server whose engine is full still says how it is and what it offers, within a second.

The server is a process of its own, as in production, and more requests wait in it than its engine takes at
once, half of them streaming token by token. The second is the deadline of each question; one question in ten
may miss it, since machines that run tests have other things to do.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services.inference.tests.serving import prompt_of
from services.inference.tests.test_process import KEY, Process

from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import open_channel

WITHIN_S = 1.0
PROBES, MAY_MISS = 10, 1
REQUESTS, COMPLETIONS, TOKENS = 96, 4, 400


class Flood:
    """Callers who ask again as soon as they are answered. The rows they want are many more than the engine
    decodes at once.
    """

    def __init__(self, address: str, model: str, methods: Collection[str]) -> None:
        # Of its own: what is asked beside it must not wait for its connection.
        self._channel = open_channel(address, key=KEY)
        self._stub = InferenceServiceStub(self._channel)
        self._model = sampling_pb2.ModelRef(base_model=model)
        self._streams = "StreamSample" in methods
        self._callers: list[asyncio.Task[None]] = []
        self.open = 0
        """Requests that the server has taken and not answered."""
        self.answered = 0

    async def _ask_again_and_again(self, caller: int) -> None:
        number = 0
        while True:
            number += 1
            params = sampling_pb2.SamplingParams(max_tokens=TOKENS, seed=caller, ignore_eos=True)
            request = pb.SampleRequest(
                request_id=f"{caller}-{number}",
                model=self._model,
                prompt=prompt_of(b"2 + 2 = " * 8),
                params=params,
                n=COMPLETIONS,
            )
            if caller % 2 and self._streams:
                calls: Any = self._stub.StreamSample(pb.StreamSampleRequest(sample=request))
            else:
                calls = self._stub.Sample(request)
            taken = False
            try:
                async for response in calls:
                    taken = taken or self._take(response)
            finally:
                self.open -= taken
            self.answered += 1

    def _take(self, response: Any) -> bool:
        started = bool(response.WhichOneof("event") == "started")
        self.open += started
        return started

    async def __aenter__(self) -> "Flood":
        self._callers = [asyncio.create_task(self._ask_again_and_again(i)) for i in range(REQUESTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for caller in self._callers:
            caller.cancel()
        ends = await asyncio.gather(*self._callers, return_exceptions=True)
        await self._channel.close()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def answered_in_time(ask: Callable[[], Awaitable[Any]]) -> bool:
    try:
        await ask()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return False
        raise
    return True


@pytest.fixture
async def serve(tmp_path: Path, tiny_model_dir: Path) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    with contextlib.ExitStack() as stack:

        async def start(**settings: object) -> str:
            process = Process(
                tmp_path / "server",
                {
                    "base_model": str(tiny_model_dir),
                    "allow_any_model_dir": True,
                    "model_cache_dir": str(tmp_path / "models"),
                    **settings,
                },
            )
            stack.callback(process.end)
            return await process.address()

        yield start


async def check(address: str, model: str) -> None:
    async with open_channel(address, key=KEY) as channel:
        stub, health = InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckRequest(service="opentinkerapi.inference.v1.InferenceService")

        async def is_up() -> bool:
            answer = await health.Check(serving)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await wait_until(is_up, 240, what="the engine runs")
        methods = (await stub.GetCapabilities(pb.GetCapabilitiesRequest())).methods
        async with Flood(address, model, methods) as flood:
            await wait_until(lambda: flood.open >= REQUESTS // 2, 120, what="the server is full")
            in_time = {"health": 0, "capabilities": 0}
            for _ in range(PROBES):
                in_time["health"] += await answered_in_time(lambda: health.Check(serving, timeout=WITHIN_S))
                in_time["capabilities"] += await answered_in_time(
                    lambda: stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=WITHIN_S)
                )
                await asyncio.sleep(0.1)
            assert flood.open, "nothing was asked any more"
            assert min(in_time.values()) >= PROBES - MAY_MISS, in_time


@pytest.mark.parametrize("engine", ["noop", "transformers"])
async def test_health_and_capabilities_answer_while_the_engine_is_full(
    serve: Any, tiny_model_dir: Path, engine: str
) -> None:
    address = await serve(engine=engine, max_rows=32)
    await check(address, str(tiny_model_dir))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_health_and_capabilities_answer_while_vllm_is_full(serve: Any, tiny_model_dir: Path) -> None:
    address = await serve(engine="vllm", dtype="float32", max_rows=32, kv_cache_bytes=64 << 20)
    await check(address, str(tiny_model_dir))
