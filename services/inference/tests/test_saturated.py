"""A server whose engine is full still says how it is and what it offers, within a second.

The server is a process of its own, as in production, and more requests wait in it than its engine takes at
once, half of them streaming token by token. The second is the deadline of each question; one question in ten
may miss it, since machines that run tests have other things to do.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services.inference.tests.serving import prompt_of
from services.inference.tests.test_process import KEY, Process

from opentinker_inference.servicer import SERVICE
from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.channels import auth_metadata, open_channel

WITHIN_S = 1.0
PROBES, MAY_MISS = 10, 1
REQUESTS, COMPLETIONS = 96, 4
TOKENS = {"transformers": 400, "vllm": 400, "noop": 16}
"""noop gives all tokens of a request at one moment; the others take a while for each."""


class Flood:
    """Callers who ask again as soon as they are answered. The rows they want are many more than the engine
    decodes at once.
    """

    def __init__(self, address: str, offer: pb.GetCapabilitiesResponse) -> None:
        # Of its own: what is asked beside it must not wait for its connection.
        self._channel = open_channel(address, key=KEY)
        self._stub = InferenceServiceStub(self._channel)
        self._model = sampling_pb2.ModelRef(base_model=offer.base_model)
        self._tokens = TOKENS[offer.engine]
        self._streams = "StreamSample" in offer.methods
        self._callers: list[asyncio.Task[None]] = []
        self.open = 0
        """Requests that the server has taken and not answered."""
        self.answered = 0

    async def _ask_again_and_again(self, caller: int) -> None:
        number = 0
        while True:
            number += 1
            params = sampling_pb2.SamplingParams(max_tokens=self._tokens, seed=caller, ignore_eos=True)
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

    def is_high(self) -> bool:
        """Many requests wait, or have gone through where none has to wait."""
        return self.open >= REQUESTS // 2 or self.answered >= 2 * REQUESTS

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


def answered_in_time(ask: Callable[..., Any], metadata: Any) -> bool:
    try:
        ask(metadata=metadata, timeout=WITHIN_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return False
        raise
    return True


def probe(address: str) -> dict[str, int]:
    """How many of each question were answered in time. In a thread: the loop here is busy with the flood."""
    metadata = auth_metadata(KEY)
    in_time = {"health": 0, "capabilities": 0}
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        stub: Any = InferenceServiceStub(channel)
        grpc.channel_ready_future(channel).result(timeout=60)
        asks = {
            "health": partial(health.Check, health_pb2.HealthCheckRequest(service=SERVICE)),
            "capabilities": partial(stub.GetCapabilities, pb.GetCapabilitiesRequest()),
        }
        for _ in range(PROBES):
            for name, ask in asks.items():
                in_time[name] += answered_in_time(ask, metadata)
            time.sleep(0.1)
    return in_time


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


async def check(address: str) -> None:
    async with open_channel(address, key=KEY) as channel:
        stub, health = InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckRequest(service=SERVICE)

        async def is_up() -> bool:
            answer = await health.Check(serving)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await wait_until(is_up, 240, what="the engine runs")
        offer = await stub.GetCapabilities(pb.GetCapabilitiesRequest())
        async with Flood(address, offer) as flood:
            await wait_until(flood.is_high, 120, what="the server is full")
            before = flood.answered
            in_time = await asyncio.to_thread(probe, address)
            assert flood.open or flood.answered > before, "nothing was asked any more"
            assert min(in_time.values()) >= PROBES - MAY_MISS, in_time


@pytest.mark.parametrize("engine", ["noop", "transformers"])
async def test_health_and_capabilities_answer_while_the_engine_is_full(serve: Any, engine: str) -> None:
    address = await serve(engine=engine, max_rows=32)
    await check(address)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_health_and_capabilities_answer_while_vllm_is_full(serve: Any) -> None:
    address = await serve(engine="vllm", dtype="float32", max_rows=32, kv_cache_bytes=64 << 20)
    await check(address)
