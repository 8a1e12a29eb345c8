"""Whether NATS and the object store answer, as health says it: `dependency/nats`, `dependency/s3`."""

import structlog

from opentinker_kit.blob_keys import blob_key
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import EventBus, NatsEventBus
from opentinker_kit.objects import ObjectStore, S3ObjectStore
from opentinker_kit.server import KitServer

log = structlog.get_logger()

_LOOK_EVERY_S = 5.0


async def look_at_dependencies(
    server: KitServer, bus: EventBus, store: ObjectStore | None, clock: Clock
) -> None:
    """Report for ever whether they answer. Nothing waits for it."""
    last: dict[str, bool] = {}
    if isinstance(bus, NatsEventBus):
        bus.start()
    while True:
        now = {"dependency/s3": await _store_answers(store, known=last.get("dependency/s3", False))}
        if isinstance(bus, NatsEventBus):
            now["dependency/nats"] = bus.connected
        for name, answers in now.items():
            if last.get(name) != answers:
                log.info("dependency", name=name, answers=answers)
                await server.set_serving(answers, name)
        last = now
        await clock.sleep(_LOOK_EVERY_S)


async def _store_answers(store: ObjectStore | None, *, known: bool) -> bool:
    """Whether the object store answers; one that did not before is given its bucket."""
    if store is None:
        return False
    try:
        if isinstance(store, S3ObjectStore) and not known:
            await store.ensure_bucket()
        await store.head(blob_key("0" * 64))
    except (ServiceError, OSError) as error:
        log.debug("the object store does not answer", error=str(error))
        return False
    return True
