"""Calls that end in ways that gRPC has no status for."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from opentinker import errors
from opentinker.connection.calls import answer, stream
from opentinker.environments.base import EnvironmentInfo
from opentinker.environments.hosted import HostedEnvironment


async def cancelled_by_nobody() -> None:
    """As grpc.aio ends a call now and then whose connection goes away as it begins."""
    raise asyncio.CancelledError


async def test_a_call_that_nobody_cancelled_is_a_lost_connection() -> None:
    with pytest.raises(errors.Unavailable) as raised:
        await answer(cancelled_by_nobody())
    assert raised.value.reason == errors.Reason.CONNECTION_LOST

    async def messages() -> AsyncIterator[int]:
        yield 1
        await cancelled_by_nobody()

    received = stream(messages())
    assert await anext(received) == 1
    with pytest.raises(errors.Unavailable):
        await anext(received)


async def test_a_hosted_source_asks_again() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        source = HostedEnvironment(channel, EnvironmentInfo("x"), {}, step_timeout_s=1.0)
        asked = []

        async def method(request: str, *, timeout: float) -> str:
            asked.append(request)
            if len(asked) < 3:
                await cancelled_by_nobody()
            return "answer"

        assert await source.call(method, "question") == "answer"
        assert asked == ["question"] * 3
        await source.close()


async def test_who_is_cancelled_is_cancelled() -> None:
    task = asyncio.create_task(answer(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await answer(asyncio.sleep(60))
