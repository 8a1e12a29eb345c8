"""An engine child for tests: run as a program, it serves a few methods that behave well and badly."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineServer, Handler
from opentinkerapi.runtime.reasons import Reason

cancelled = 0
order: list[int] = []


async def echo(request: BytesValue) -> BytesValue:
    return request


async def refuse(request: StringValue) -> StringValue:
    raise ServiceError(Reason.PROMPT_TOO_LONG, request.value, field="prompt", metadata={"tokens": 9})


async def crash(request: StringValue) -> StringValue:
    raise RuntimeError("secret of the engine")


async def exit_now(request: Int64Value) -> StringValue:
    os._exit(request.value)


async def count(request: Int64Value) -> AsyncIterator[Int64Value]:
    global cancelled
    try:
        for index in range(request.value):
            yield Int64Value(value=index)
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        cancelled += 1
        raise


async def cancellations(request: Int64Value) -> Int64Value:
    return Int64Value(value=cancelled)


def work(request: Int64Value) -> Int64Value:
    """In the worker thread: later calls are quicker, so that only the queue keeps them in order."""
    time.sleep(0.05 / (1 + len(order)))
    order.append(request.value)
    return Int64Value(value=len(order))


def hang(request: Int64Value) -> Int64Value:
    time.sleep(1000)
    return request


async def block_loop(request: Int64Value) -> Int64Value:
    time.sleep(1000)  # noqa: ASYNC251 (a loop that is stuck, as in a long kernel)
    return request


async def spawn(request: Int64Value) -> Int64Value:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])  # noqa: ASYNC220
    return Int64Value(value=child.pid)


if __name__ == "__main__":
    handlers = {
        "Echo": Handler(BytesValue, echo),
        "Refuse": Handler(StringValue, refuse),
        "Crash": Handler(StringValue, crash),
        "Exit": Handler(Int64Value, exit_now),
        "Count": Handler(Int64Value, count),
        "Cancellations": Handler(Int64Value, cancellations),
        "Work": Handler(Int64Value, work),
        "Hang": Handler(Int64Value, hang),
        "BlockLoop": Handler(Int64Value, block_loop),
        "Spawn": Handler(Int64Value, spawn),
    }
    EngineServer(handlers).run()
