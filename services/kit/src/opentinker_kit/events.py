"""Events: facts on NATS JetStream, under `opentinker.v1.<area>.<fact>`. Hints only; the truth is in SQL and
S3.

Publishing never blocks its caller: `publish` puts the event into a bounded queue and returns, and while NATS
is down the oldest events fall out of it. What must not be lost is kept by its producer in an **outbox** (a
row in the transaction of the change, or the S3 manifest itself) and goes out through `deliver`, which says
whether the stream has it. Sent twice under one id, an event is stored once.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import nats
import nats.errors
import nats.js.api
import nats.js.errors
import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from opentinker_kit.errors import ServiceError
from opentinkerapi.events.v1 import event_pb2

log = structlog.get_logger()

STREAM = "OPENTINKER"
PREFIX = "opentinker.v1"
ALL_SUBJECTS = f"{PREFIX}.>"
_MAX_AGE_S = 7 * 24 * 3600.0
_MAX_BYTES = 256 * 1024 * 1024
_DEDUPE_S = 600.0
_RETRY_S = 0.5


class EventBus(Protocol):
    """Where facts are announced and heard."""

    async def publish(self, event: event_pb2.Event, msg_id: str = "") -> None:
        """Announce a fact and return at once; it is lost if the bus stays down for long."""
        ...

    async def deliver(self, event: event_pb2.Event, msg_id: str = "", timeout_s: float = 2.0) -> bool:
        """Announce a fact; whether the stream has it now. For outboxes."""
        ...

    def subscribe(self, subject_filter: str, durable: str | None = None) -> AsyncIterator[event_pb2.Event]:
        """Facts under a subject filter (`opentinker.v1.job.>`), for ever.

        Without `durable` those from now on; with it also those since this name last took one, which is marked
        as taken when the next one is asked for.
        """
        ...

    async def close(self) -> None:
        """Stop; what is still queued is lost."""
        ...


def subject_of(event: event_pb2.Event) -> str:
    """The subject that an event is published under. ValueError if it carries no fact."""
    name = event.WhichOneof("fact")
    if name is None:
        raise ValueError("the event carries no fact")
    if name == "job_changed":
        return f"{PREFIX}.job.{event.job_changed.state}"
    area, _, fact = name.partition("_")
    return f"{PREFIX}.{area}.{fact}"


class NullEventBus:
    """No bus: everyone polls the truth."""

    async def publish(self, event: event_pb2.Event, msg_id: str = "") -> None:
        subject_of(event)

    async def deliver(self, event: event_pb2.Event, msg_id: str = "", timeout_s: float = 2.0) -> bool:
        subject_of(event)
        return True

    async def subscribe(
        self, subject_filter: str, durable: str | None = None
    ) -> AsyncIterator[event_pb2.Event]:
        await asyncio.Event().wait()
        yield event_pb2.Event()

    async def close(self) -> None:
        return None


class NatsEventBus:
    """JetStream stream `OPENTINKER`. Connects in the background and again for as long as it lives."""

    def __init__(self, url: str, token: str | None = None, *, queue_size: int = 1000) -> None:
        self._url = url
        self._token = token
        self._queue: deque[tuple[event_pb2.Event, str]] = deque(maxlen=queue_size)
        self._queued = asyncio.Event()
        self._client = Client()
        self._stream: JetStreamContext | None = None
        self._connected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.dropped = 0
        """Events that fell out of the queue."""

    def start(self) -> None:
        """Begin to connect and to send. Needs a running event loop."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._connect()), loop.create_task(self._send())]

    @property
    def connected(self) -> bool:
        """Whether the stream can be reached now."""
        return self._stream is not None and self._client.is_connected

    async def publish(self, event: event_pb2.Event, msg_id: str = "") -> None:
        self.start()
        subject_of(event)
        if len(self._queue) == self._queue.maxlen:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:
                log.warning("event queue is full; the oldest are dropped", dropped=self.dropped)
        self._queue.append((event, msg_id or event.id))
        self._queued.set()

    async def deliver(self, event: event_pb2.Event, msg_id: str = "", timeout_s: float = 2.0) -> bool:
        self.start()
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
                await self._publish(event, msg_id or event.id, timeout_s)
        except (TimeoutError, nats.errors.Error, OSError):
            return False
        return True

    async def subscribe(
        self, subject_filter: str, durable: str | None = None
    ) -> AsyncIterator[event_pb2.Event]:
        self.start()
        source = self._since_last(subject_filter, durable) if durable else self._from_now(subject_filter)
        async with contextlib.aclosing(source) as messages:
            async for message in messages:
                try:
                    yield event_pb2.Event.FromString(message.data)
                except DecodeError:
                    log.warning("an event cannot be read", subject=message.subject)

    async def close(self) -> None:
        await _end(self._tasks)
        await _close(self._client)

    async def _connect(self) -> None:
        """Connect for the first time, then leave reconnecting to the client; declare the stream each time."""

        async def reconnected() -> None:
            await self._declare_until_done()

        async def failed(error: Exception) -> None:
            log.debug("event bus", error=repr(error))

        while True:
            try:
                await self._client.connect(
                    self._url,
                    token=self._token,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    connect_timeout=2,
                    reconnected_cb=reconnected,
                    error_cb=failed,
                )
                break
            except (nats.errors.Error, OSError, TimeoutError) as error:
                log.debug("event bus is down", error=repr(error))
                await _close(self._client)
                self._client = Client()
                await asyncio.sleep(_RETRY_S)
        await self._declare_until_done()

    async def _declare_until_done(self) -> None:
        stream = self._client.jetstream(timeout=5)
        config = nats.js.api.StreamConfig(
            name=STREAM,
            subjects=[ALL_SUBJECTS],
            max_age=_MAX_AGE_S,
            max_bytes=_MAX_BYTES,
            duplicate_window=_DEDUPE_S,
            storage=nats.js.api.StorageType.FILE,
        )
        while self._client.is_connected:
            try:
                await stream.add_stream(config)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                log.debug("event stream is not ready", error=repr(error))
                await asyncio.sleep(_RETRY_S)
                continue
            self._stream = stream
            self._connected.set()
            return

    async def _send(self) -> None:
        while True:
            await self._queued.wait()
            self._queued.clear()
            while self._queue:
                await self._connected.wait()
                event, msg_id = self._queue[0]
                try:
                    await self._publish(event, msg_id, timeout_s=5.0)
                except (nats.errors.Error, OSError, TimeoutError):
                    await asyncio.sleep(_RETRY_S)
                    continue
                # It may have fallen out of the full queue meanwhile.
                if self._queue and self._queue[0][1] == msg_id:
                    self._queue.popleft()

    async def _publish(self, event: event_pb2.Event, msg_id: str, timeout_s: float) -> None:
        if self._stream is None:
            raise nats.errors.ConnectionClosedError
        headers = {"Nats-Msg-Id": msg_id} if msg_id else None
        await self._stream.publish(
            subject_of(event), event.SerializeToString(), timeout=timeout_s, headers=headers
        )

    async def _from_now(self, subject_filter: str) -> AsyncGenerator[Msg, None]:
        # A plain subscription hears what is published to the stream, and the client renews it by itself.
        await self._connected.wait()
        subscription = await self._client.subscribe(subject_filter)
        try:
            async for message in subscription.messages:
                yield message
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _since_last(self, subject_filter: str, durable: str) -> AsyncGenerator[Msg, None]:
        while True:
            await self._connected.wait()
            assert self._stream is not None
            try:
                subscription = await self._stream.pull_subscribe(subject_filter, durable, stream=STREAM)
                while True:
                    for message in await _fetch(subscription):
                        yield message
                        await message.ack()
            except (nats.errors.Error, OSError, TimeoutError) as error:
                log.debug("event subscription is renewed", durable=durable, error=repr(error))
                await asyncio.sleep(_RETRY_S)


async def _end(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Cancel tasks until they have ended. One cancellation may not be enough: `asyncio.wait_for`, with which
    the library waits, loses it in Python 3.11 where what it waits for comes in the same moment.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_RETRY_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _close(client: Client) -> None:
    """Close a client that may never have connected, which the library cannot flush."""
    if client.is_connected or client.is_reconnecting:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                await client.close()


async def _fetch(subscription: JetStreamContext.PullSubscription) -> list[Msg]:
    try:
        return await subscription.fetch(batch=32, timeout=5)
    except TimeoutError:
        return []


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """An event that was recorded with the change it tells of, and not announced yet."""

    row_id: int
    event: event_pb2.Event


class Outbox(Protocol):
    """Recorded events, kept by whoever owns the change (a table; a listing of manifests)."""

    async def pending(self, limit: int) -> Sequence[OutboxRow]:
        """Rows not yet marked as sent, oldest first."""
        ...

    async def mark_sent(self, row_ids: Sequence[int]) -> None:
        """Forget these rows."""
        ...


class OutboxRelay:
    """Moves recorded events to the bus: at least once, in order, deduplicated there by event id."""

    def __init__(self, outbox: Outbox, bus: EventBus, *, interval_s: float = 1.0, batch: int = 100) -> None:
        self._outbox = outbox
        self._bus = bus
        self._interval_s = interval_s
        self._batch = batch
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Look again now: something was recorded."""
        self._nudged.set()

    async def relay_once(self) -> int:
        """Send what is pending; how many rows went out. Stops at the first that the bus does not take."""
        sent: list[int] = []
        for row in await self._outbox.pending(self._batch):
            if not await self._bus.deliver(row.event, row.event.id):
                break
            sent.append(row.row_id)
        if sent:
            await self._outbox.mark_sent(sent)
        return len(sent)

    async def run(self) -> None:
        """Relay for ever; a failing outbox is logged and tried again."""
        while True:
            try:
                if await self.relay_once() == self._batch:
                    continue
            except ServiceError as error:
                log.warning("the outbox waits", error=error.message)
            except Exception:
                log.exception("the outbox could not be relayed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._nudged.wait()
            self._nudged.clear()
