"""Leases of servers and jobs while this process leads, and who was heard from since it does."""

import structlog

from opentinker_kit.clock import Clock
from opentinker_scheduler.domain.leases import LeaseTable
from opentinker_scheduler.domain.model import Job, OnClientLoss

log = structlog.get_logger()

_STALL_S = 5.0
"""The loop beats every second; a longer gap means that it was this process who slept."""


class Leases:
    """The leader's memory of renewals. A restart empties it and gives everyone one TTL.

    While this process itself stood still nobody could renew: every lease gets that time back, before anything
    is decided by it.
    """

    def __init__(self, clock: Clock, server_ttl_s: float) -> None:
        self._clock = clock
        self.server_ttl_s = server_ttl_s
        self.servers = LeaseTable()
        self.jobs = LeaseTable()
        self._attended: set[str] = set()
        self._last_beat = clock.monotonic()

    def begin(self) -> None:
        """Lead from now on: until then nobody had a lease, so standing by was no standstill."""
        self._last_beat = self._clock.monotonic()

    def beat(self) -> float:
        """The time, having made up for a standstill."""
        now = self._clock.monotonic()
        gap, self._last_beat = now - self._last_beat, now
        if gap > _STALL_S:
            log.warning("the scheduler stood still; leases are extended", seconds=round(gap, 1))
            self.excuse(gap)
        return now

    def excuse(self, seconds: float) -> None:
        """Give everyone that much more time: they could not be heard for so long."""
        self.servers.extend_all(seconds)
        self.jobs.extend_all(seconds)

    def grant_server(self, server_id: str) -> None:
        self.servers.grant(server_id, self.server_ttl_s, self.beat())

    def renew_server(self, server_id: str) -> bool:
        return self.servers.renew(server_id, self.beat())

    def grant_job(self, job: Job) -> None:
        """Give a job's client one TTL. A detached job has no client: nobody need ask for it, ever."""
        if job.on_client_loss is OnClientLoss.DETACH:
            self._attended.add(job.id)
        else:
            self.jobs.grant(job.id, job.lease_ttl_s, self.beat())

    def end_job(self, job_id: str) -> None:
        self.jobs.release(job_id)
        self._attended.discard(job_id)

    def server_seconds_left(self, server_id: str) -> float:
        return self.servers.remaining(server_id, self._clock.monotonic())

    def attended(self) -> frozenset[str]:
        """Jobs whose client was heard since this process leads. Nothing is started for others: after a
        restart of everything, the jobs of yesterday would take servers that nobody waits for."""
        return frozenset(self._attended)

    def attend(self, job_id: str) -> bool:
        """A client asked about a job; whether it is the first time."""
        if job_id in self._attended:
            return False
        self._attended.add(job_id)
        return True
