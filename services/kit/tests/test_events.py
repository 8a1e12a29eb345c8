"""Events with NATS up, down and coming back. Nothing here may block a publisher."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from opentinker_kit.events import (
    EventBus,
    NatsEventBus,
    NullEventBus,
    OutboxRelay,
    OutboxRow,
    subject_of,
)
from opentinker_kit.processes import free_port
from opentinker_kit.testing import NatsServer, start_nats, wait_until
from opentinkerapi.events.v1 import event_pb2


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server of this module's own: a durable subscriber also hears what other tests left in the stream."""
    with start_nats(tmp_path_factory.mktemp("nats-events")) as server:
        yield server


def job(event_id: str, state: str = "queued") -> event_pb2.Event:
    event = event_pb2.Event(id=event_id, source="test")
    event.job_changed.job = "jobs/1"
    event.job_changed.state = state
    return event


@contextlib.asynccontextmanager
async def bus_at(url: str, **options: int) -> AsyncIterator[NatsEventBus]:
    bus = NatsEventBus(url, **options)
    bus.start()
    try:
        yield bus
    finally:
        await bus.close()


async def take(source: AsyncIterator[event_pb2.Event], count: int, within_s: float = 10.0) -> list[str]:
    ids: list[str] = []
    async with asyncio.timeout(within_s):
        while len(ids) < count:
            ids.append((await anext(source)).id)
    return ids


class MemoryOutbox:
    """Rows in a list, as a table would hold them."""

    def __init__(self, *events: event_pb2.Event) -> None:
        self.rows = [OutboxRow(index, event) for index, event in enumerate(events)]

    async def pending(self, limit: int) -> Sequence[OutboxRow]:
        return self.rows[:limit]

    async def mark_sent(self, row_ids: Sequence[int]) -> None:
        self.rows = [row for row in self.rows if row.row_id not in row_ids]


def test_subjects() -> None:
    assert subject_of(job("1", "started")) == "opentinker.v1.job.started"
    published = event_pb2.Event(weights_published=event_pb2.WeightsPublished(policy="policies/p"))
    assert subject_of(published) == "opentinker.v1.weights.published"
    with pytest.raises(ValueError, match="no fact"):
        subject_of(event_pb2.Event(id="1"))


async def test_a_subscriber_hears_what_its_filter_lets_through(nats_server: NatsServer) -> None:
    async with bus_at(nats_server.url) as bus:
        heard = bus.subscribe("opentinker.v1.job.>")
        first = asyncio.create_task(take(heard, 2))
        await wait_until(lambda: bus.connected)
        await asyncio.sleep(0.2)
        other = event_pb2.Event(id="w", weights_published=event_pb2.WeightsPublished(policy="p"))
        for event in (job("a"), other, job("b", "started")):
            await bus.publish(event)
        assert await first == ["a", "b"]


async def test_a_durable_subscriber_hears_what_it_missed_and_nothing_twice(nats_server: NatsServer) -> None:
    async with bus_at(nats_server.url) as bus:
        heard = bus.subscribe("opentinker.v1.job.paused", durable="durable-1")
        waiting = asyncio.create_task(take(heard, 1))
        await wait_until(lambda: bus.connected)
        await asyncio.sleep(0.2)
        await bus.publish(job("d1", "paused"))
        assert await waiting == ["d1"]
        # Asking for the next one marks the first as taken.
        more = asyncio.create_task(take(heard, 1))
        await asyncio.sleep(0.2)
        more.cancel()
        await asyncio.gather(more, return_exceptions=True)
    async with bus_at(nats_server.url) as bus:
        assert await bus.deliver(job("d2", "paused"))
        again = bus.subscribe("opentinker.v1.job.paused", durable="durable-1")
        assert await take(again, 1) == ["d2"]


async def test_the_same_id_is_stored_once(nats_server: NatsServer) -> None:
    async with bus_at(nats_server.url) as bus:
        heard = bus.subscribe("opentinker.v1.job.cancelled", durable="dedupe")
        waiting = asyncio.create_task(take(heard, 2))
        for event_id in ("same", "same", "last"):
            assert await bus.deliver(job(event_id, "cancelled"))
        assert await waiting == ["same", "last"]


async def test_with_nats_down_nothing_blocks_and_the_queue_is_bounded() -> None:
    async with bus_at(f"nats://127.0.0.1:{free_port()}", queue_size=10) as bus:
        start = time.monotonic()
        for index in range(1000):
            await bus.publish(job(str(index)))
        assert time.monotonic() - start < 0.5
        assert bus.dropped == 990
        assert not await bus.deliver(job("x"), timeout_s=0.2)
        assert not bus.connected


async def test_events_queued_while_nats_was_down_arrive_when_it_is_back(tmp_path: Path) -> None:
    with start_nats(tmp_path) as server:
        async with bus_at(server.url) as bus:
            heard = bus.subscribe("opentinker.v1.>", durable="all")
            waiting = asyncio.create_task(take(heard, 3, within_s=30))
            assert await bus.deliver(job("before"))
            server.kill()
            await bus.publish(job("while-down"))
            assert not await bus.deliver(job("refused"), timeout_s=0.5)
            server.restart()
            await wait_until(lambda: bus.connected, 15)
            assert await bus.deliver(job("after"), timeout_s=10)
            assert set(await waiting) == {"before", "while-down", "after"}


async def test_a_bus_that_starts_before_nats_connects_when_it_comes(tmp_path: Path) -> None:
    with start_nats(tmp_path) as server:
        server.kill()
        async with bus_at(server.url) as bus:
            await bus.publish(job("early"))
            await asyncio.sleep(0.3)
            server.restart()
            heard = bus.subscribe("opentinker.v1.>", durable="late")
            assert await take(heard, 1, within_s=15) == ["early"]


class TestOutbox:
    async def test_rows_go_out_in_order_and_are_forgotten(self, nats_server: NatsServer) -> None:
        outbox = MemoryOutbox(*(job(f"o{index}", "failed") for index in range(5)))
        async with bus_at(nats_server.url) as bus:
            relay = OutboxRelay(outbox, bus, batch=3)
            assert [await relay.relay_once() for _ in range(3)] == [3, 2, 0]
            heard = bus.subscribe("opentinker.v1.job.failed", durable="outbox")
            assert await take(heard, 5) == [f"o{index}" for index in range(5)]

    async def test_rows_stay_while_nats_is_down(self) -> None:
        outbox = MemoryOutbox(job("1"), job("2"))

        class Down(NullEventBus):
            async def deliver(self, event: event_pb2.Event, msg_id: str = "", timeout_s: float = 2.0) -> bool:
                return False

        bus: EventBus = Down()
        assert await OutboxRelay(outbox, bus).relay_once() == 0
        assert len(outbox.rows) == 2

    async def test_the_relay_survives_a_failing_outbox_and_a_nudge_wakes_it(self) -> None:
        class Flaky(MemoryOutbox):
            failures = 1

            async def pending(self, limit: int) -> Sequence[OutboxRow]:
                if self.failures:
                    self.failures -= 1
                    raise OSError("database is locked")
                return await super().pending(limit)

        outbox = Flaky(job("1"))
        relay = OutboxRelay(outbox, NullEventBus(), interval_s=60)
        running = asyncio.create_task(relay.run())
        await wait_until(lambda: outbox.failures == 0)
        relay.nudge()
        await wait_until(lambda: not outbox.rows)
        running.cancel()


async def test_a_bus_that_was_never_used_closes() -> None:
    await NatsEventBus("nats://127.0.0.1:1").close()


async def test_the_null_bus_takes_everything_and_says_nothing() -> None:
    bus = NullEventBus()
    await bus.publish(job("1"))
    assert await bus.deliver(job("2"))
    with pytest.raises(TimeoutError):
        await take(bus.subscribe("opentinker.v1.>"), 1, within_s=0.1)
    await bus.close()


async def test_closing_ends_although_a_cancellation_is_lost(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` of Python 3.11 forgets it where an answer comes in the same moment."""
    async with bus_at(nats_server.url) as bus:
        await wait_until(lambda: bus.connected)
        waiting = asyncio.Event()

        async def answered_just_then(*_: object, **__: object) -> None:
            waiting.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

        monkeypatch.setattr(bus, "_publish", answered_just_then)
        await bus.publish(job("a"))
        await waiting.wait()
        async with asyncio.timeout(10):
            await bus.close()
