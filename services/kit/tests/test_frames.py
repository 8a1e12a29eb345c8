"""Fronts and engine children: what crosses, and what happens when one of them dies or hangs."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import EngineProcess
from opentinker_kit.testing import wait_until, wait_until_sync
from opentinkerapi.runtime.reasons import Reason

CHILD = [sys.executable, str(Path(__file__).parent / "engine_child.py")]
ONE = Int64Value(value=1)

FRONT = """
import asyncio, sys
from pathlib import Path
from google.protobuf.wrappers_pb2 import Int64Value
from opentinker_kit.frames import EngineProcess

async def main():
    engine = EngineProcess(sys.argv[1:], log_path=Path("/dev/null"))
    await engine.start()
    grandchild = await engine.call("Spawn", Int64Value(value=1), Int64Value)
    print(engine.pid, grandchild.value, flush=True)
    await engine.call("BlockLoop", Int64Value(value=1), Int64Value)

asyncio.run(main())
"""


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineProcess]:
    process = EngineProcess(CHILD, log_path=tmp_path / "engine.log")
    await process.start()
    yield process
    await process.close()


async def test_calls_cross_whatever_their_size(engine: EngineProcess) -> None:
    for size in (0, 1, 20_000_000):
        answer = await engine.call("Echo", BytesValue(value=b"x" * size), BytesValue)
        assert len(answer.value) == size


async def test_calls_run_beside_each_other_and_find_their_answers(engine: EngineProcess) -> None:
    requests = [BytesValue(value=b"%d" % index) for index in range(50)]
    answers = await asyncio.gather(*(engine.call("Echo", request, BytesValue) for request in requests))
    assert list(answers) == requests


async def test_plain_functions_run_one_after_the_other_in_order(engine: EngineProcess) -> None:
    calls = [engine.call("Work", Int64Value(value=index), Int64Value) for index in range(6)]
    assert [answer.value for answer in await asyncio.gather(*calls)] == [1, 2, 3, 4, 5, 6]


async def test_a_stream_arrives_message_by_message(engine: EngineProcess) -> None:
    answers = engine.stream("Count", Int64Value(value=5), Int64Value)
    assert [answer.value async for answer in answers] == [0, 1, 2, 3, 4]


async def test_leaving_a_stream_cancels_it_in_the_child(engine: EngineProcess) -> None:
    answers = engine.stream("Count", Int64Value(value=10_000), Int64Value)
    await anext(answers)
    await answers.aclose()  # type: ignore[attr-defined]

    async def was_cancelled() -> bool:
        return (await engine.call("Cancellations", ONE, Int64Value)).value == 1

    await wait_until(was_cancelled)


async def test_typed_errors_cross_and_others_say_only_their_id(engine: EngineProcess) -> None:
    with pytest.raises(ServiceError) as caught:
        await engine.call("Refuse", StringValue(value="9 tokens are too many"), StringValue)
    error = caught.value
    assert (error.reason, error.message, error.field) == (
        Reason.PROMPT_TOO_LONG,
        "9 tokens are too many",
        None,
    )
    assert error.violations == (("prompt", "9 tokens are too many"),)
    assert error.metadata == {"tokens": "9"}
    with pytest.raises(ServiceError) as caught:
        await engine.call("Crash", StringValue(), StringValue)
    assert caught.value.reason == Reason.INTERNAL
    assert "secret" not in str(caught.value)
    assert caught.value.metadata["error_id"] in engine.log_tail()
    assert "secret of the engine" in engine.log_tail()
    with pytest.raises(ServiceError) as caught:
        await engine.call("Nope", StringValue(), StringValue)
    assert caught.value.reason == Reason.UNIMPLEMENTED


async def test_a_dying_child_fails_every_call_under_way(engine: EngineProcess) -> None:
    hanging = asyncio.create_task(engine.call("Hang", ONE, Int64Value))
    streaming = asyncio.create_task(anext(engine.stream("Count", Int64Value(value=0), Int64Value), None))
    await asyncio.sleep(0.05)
    with pytest.raises(ServiceError) as caught:
        await engine.call("Exit", Int64Value(value=3), StringValue)
    assert caught.value.reason == Reason.ENGINE_CRASHED
    assert await asyncio.wait_for(engine.exited, 5) == 3
    for task in (hanging, streaming):
        with contextlib.suppress(ServiceError):
            await asyncio.wait_for(task, 5)
    with pytest.raises(ServiceError) as caught:
        await engine.call("Echo", BytesValue(), BytesValue)
    assert caught.value.reason == Reason.ENGINE_CRASHED
    assert caught.value.metadata == {"exit_status": "3"}


async def test_a_killed_child_is_noticed(engine: EngineProcess) -> None:
    call = asyncio.create_task(engine.call("Hang", ONE, Int64Value))
    await asyncio.sleep(0.1)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(ServiceError) as caught:
        await asyncio.wait_for(call, 5)
    assert caught.value.reason == Reason.ENGINE_CRASHED
    assert await engine.exited == -signal.SIGKILL
    assert not engine.alive


@pytest.mark.parametrize("method", ["Hang", "BlockLoop"])
async def test_a_hanging_child_is_killed_with_all_it_started(engine: EngineProcess, method: str) -> None:
    grandchild = (await engine.call("Spawn", ONE, Int64Value)).value
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.call(method, ONE, Int64Value)
    await asyncio.wait_for(engine.close(), 5)
    await wait_until(lambda: not running(grandchild))


def test_when_the_front_is_killed_a_busy_child_ends_with_all_it_started() -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT, *CHILD], stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pids = [int(word) for word in front.stdout.readline().split()]
    assert all(running(pid) for pid in pids)
    front.kill()
    front.wait()
    front.stdout.close()
    wait_until_sync(lambda: not any(running(pid) for pid in pids), 5)


async def test_the_lifeline_ends_the_child(tmp_path: Path) -> None:
    read, write = os.pipe()
    engine = EngineProcess(CHILD, log_path=tmp_path / "log", lifeline_fd=read)
    await engine.start()
    await engine.call("Echo", BytesValue(), BytesValue)
    os.close(read)
    os.close(write)
    assert await asyncio.wait_for(engine.exited, 5) != 0


async def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-program"):
        await EngineProcess(["/no-such-program"], log_path=tmp_path / "log").start()
    script = "raise SystemExit('torch is missing')"
    engine = EngineProcess([sys.executable, "-c", script], log_path=tmp_path / "log")
    await engine.start()
    with pytest.raises(ServiceError):
        await engine.call("Echo", BytesValue(), BytesValue)
    assert "torch is missing" in engine.log_tail()
