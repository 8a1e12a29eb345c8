"""What was used: tokens as servers count them, and rows for who asks.

A server says with its renewals how many tokens it has worked on for each job since it started. What is new of
that becomes part of the usage every few seconds, in one transaction with a note of how far it was counted: so
nothing is counted twice, whichever server or scheduler starts again. What a server had not said when it was
killed, a few seconds of work, is lost.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import day_of, held_since_grant
from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.domain.shares import Used
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.replica_ports import LeadershipLost

log = structlog.get_logger()

_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens that a server worked on for a job (its id) since it started."""

    job_id: str
    trained: int
    sampled: int


class Usage:
    """Takes counts in (`run`), and says what was used."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._heard: dict[tuple[str, str], TokenCount] = {}

    def heard(self, server_id: str, counts: Iterable[TokenCount]) -> None:
        """A server said how far it is."""
        for count in counts:
            self._heard[server_id, count.job_id] = count

    async def run(self) -> None:
        """Take in what was heard, for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.take_in()
            except (ServiceError, LeadershipLost) as error:
                log.warning("counts of tokens wait", error=str(error))

    async def take_in(self) -> None:
        """Make what was heard part of the usage."""
        heard = dict(self._heard)
        if not heard:
            return
        await self._database.run(lambda tx: self._count(tx, heard))
        for key, count in heard.items():
            if self._heard.get(key) == count:
                del self._heard[key]

    def _count(self, tx: Transaction, heard: dict[tuple[str, str], TokenCount]) -> None:
        today = day_of(self._clock.now())
        for (server_id, job_id), count in heard.items():
            job = tx.jobs.find(job_id)
            if job is None:
                continue
            trained, sampled = tx.usage.counted(server_id, job_id)
            more = Used(
                tokens_trained=max(0, count.trained - trained), tokens_sampled=max(0, count.sampled - sampled)
            )
            if more != Used():
                tx.usage.add(job, today, more)
                tx.usage.set_counted(
                    server_id, job_id, max(trained, count.trained), max(sampled, count.sampled)
                )

    def forget(self, tx: Transaction) -> None:
        """Delete notes about servers that have ended."""
        tx.usage.forget_counted({server.id for server in tx.servers.live()})

    def days(
        self, tx: Transaction, project: str, before: str | None, size: int
    ) -> Sequence[tuple[str, Used]]:
        """Days of a project, newest first, with what its jobs hold now."""
        found = dict(tx.usage.page_days(project, before, size))
        for job in self._holding(tx, project):
            for day, more in held_since_grant(job, self._clock.now()):
                if before is None or day < before:
                    found[day] = found.get(day, Used()) + more
        return sorted(found.items(), reverse=True)[:size]

    def jobs(
        self, tx: Transaction, project: str, before: int | None, size: int
    ) -> Sequence[tuple[int, str, Used]]:
        """Jobs of a project that were ever placed, newest first, with what they hold now."""
        holds: dict[str, Used] = {}
        for job in self._holding(tx, project):
            for _, more in held_since_grant(job, self._clock.now()):
                holds[job.id] = holds.get(job.id, Used()) + more
        return [
            (seq, job_id, used + holds.get(job_id, Used()))
            for seq, job_id, used in tx.usage.page_jobs(project, before, size)
        ]

    def _holding(self, tx: Transaction, project: str) -> Iterator[Job]:
        return (job for job in tx.jobs.live() if job.project == project and job.grant_time is not None)
