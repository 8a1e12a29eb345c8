"""Announces failed episodes on the event bus."""

import uuid

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.events import EventBus
from opentinkerapi.events.v1 import event_pb2

log = structlog.get_logger()


class BusFailureSink:
    """Publishes `opentinker.v1.episode.failed`."""

    def __init__(self, bus: EventBus, clock: Clock, source: str) -> None:
        self._bus = bus
        self._clock = clock
        self._source = source

    async def episode_failed(self, episode: str, environment: str, reason: str) -> None:
        fact = event_pb2.EpisodeFailed(
            episode=episode, environment=f"environments/{environment}", reason=reason
        )
        event = event_pb2.Event(id=uuid.uuid4().hex, source=self._source, episode_failed=fact)
        event.occur_time.FromDatetime(self._clock.now())
        try:
            await self._bus.publish(event, event.id)
        except Exception:  # an event is a hint: that it cannot be sent must not fail a step
            log.exception("event was not published", episode=episode)
