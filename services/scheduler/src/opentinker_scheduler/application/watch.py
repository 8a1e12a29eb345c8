"""Who waits for which job: woken after each commit that changed it."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import contextmanager

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import job_of
from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.ports import Database
from opentinkerapi.runtime.reasons import Reason

_LOOK_AGAIN_S = 10.0


class JobWatchers:
    """Streams of one job's states."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._closed = False

    def changed(self, job_ids: Collection[str]) -> None:
        """Wake who waits for one of these jobs. From the event loop."""
        for job_id in job_ids:
            for event in self._waiting.get(job_id, ()):
                event.set()

    def close(self) -> None:
        """End every stream with DRAINING: the scheduler stops."""
        self._closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def watch(self, name: str, scope: str | None) -> AsyncIterator[Job]:
        """The job now and after each change until it is final; of quick changes only the last."""
        seen = 0
        job_id = name.removeprefix("jobs/")
        with self._registered(job_id) as event:
            while True:
                event.clear()
                job = await self._database.run(lambda tx: job_of(tx, name, scope))
                if job.revision != seen:
                    seen = job.revision
                    yield job
                if job.state.final:
                    return
                if self._closed:
                    raise ServiceError(
                        Reason.DRAINING, "the scheduler is stopping; watch again", retry_after_s=1.0
                    )
                await _wait(event)

    @contextmanager
    def _registered(self, job_id: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


async def _wait(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_LOOK_AGAIN_S):
            await event.wait()
    except TimeoutError:
        return
