"""Facts reach NATS after the change they tell of; with NATS down nothing is lost and nothing waits."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opentinker_kit.events import NatsEventBus
from opentinker_kit.testing import start_nats, wait_until
from opentinkerapi.events.v1 import event_pb2
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb


@pytest.fixture
async def heard(nats_server: Any) -> AsyncIterator[list[event_pb2.Event]]:
    """Everything that is said about jobs from now on."""
    bus = NatsEventBus(nats_server.url)
    events: list[event_pb2.Event] = []

    async def listen() -> None:
        async for event in bus.subscribe("opentinker.v1.>"):
            events.append(event)

    listening = asyncio.create_task(listen())
    bus.start()
    await wait_until(lambda: bus.connected)
    await asyncio.sleep(0.1)
    yield events
    listening.cancel()
    await bus.close()


def states_of(events: list[event_pb2.Event], job: str) -> list[str]:
    return [e.job_changed.state for e in events if e.job_changed.job == job]


async def test_a_job_is_followed_by_its_events(start_rig: Any, nats_server: Any, heard: Any) -> None:
    rig = await start_rig(nats_url=nats_server.url)
    job = await rig.create_job()
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    await wait_until(lambda: states_of(heard, job.name) == ["queued", "started", "cancelled"])
    assert any(event.WhichOneof("fact") == "server_registered" for event in heard)
    assert await rig.scheduler.database.run(lambda tx: len(tx.outbox.pending(10))) == 0


async def test_with_nats_down_nothing_waits_and_nothing_is_lost(start_rig: Any, tmp_path: Path) -> None:
    (tmp_path / "nats").mkdir()
    with start_nats(tmp_path / "nats") as server:
        rig = await start_rig(nats_url=server.url)
        server.kill()
        job = await rig.create_job()
        await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
        await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
        assert await rig.scheduler.database.run(lambda tx: len(tx.outbox.pending(10))) >= 4
        # Not `restart`, which forks: gRPC's threads do not survive that in this process.
        server.process = replace(server.nats.program(), dies_with_parent=False).start()

        async def empty() -> bool:
            return not await rig.scheduler.database.run(lambda tx: tx.outbox.pending(1))

        await wait_until(empty, 20.0, what="the outbox is empty")
        bus, events = NatsEventBus(server.url), []

        async def listen() -> None:
            async for event in bus.subscribe("opentinker.v1.job.>", durable="test"):
                events.append(event)

        listening = asyncio.create_task(listen())
        await wait_until(lambda: states_of(events, job.name) == ["queued", "started", "cancelled"])
        listening.cancel()
        await bus.close()
