"""The audit log: who changed what, and who was refused. Written beside the calls, in batches.

A call does not wait for its entry: what the last moment brought is lost if the scheduler is killed. A flood
of calls cannot fill memory or disk: beyond `MAX_WAITING` entries are dropped and counted, and the log keeps
so many entries for so long.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice

import structlog

from opentinker_kit.auth import Principal
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.account_ports import AuditFilter
from opentinker_scheduler.domain.accounts import AuditEntry
from opentinker_scheduler.ports import Database, Transaction

log = structlog.get_logger()

MAX_WAITING = 10_000
_BATCH = 500
_GATHER_S = 0.2
"""Entries of so long go into one transaction."""


class AuditLog:
    """Takes entries, and writes them in the background (`run`)."""

    def __init__(self, database: Database, clock: Clock, *, keep: timedelta, most: int) -> None:
        self._database = database
        self._clock = clock
        self._keep = keep
        self._most = most
        self._waiting: deque[AuditEntry] = deque()
        self._came = asyncio.Event()
        self._writing = asyncio.Lock()
        self._dropped = 0

    def add(self, principal: Principal | None, method: str, resource: str, outcome: str, peer: str) -> None:
        """Note a call that ended."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        known = principal is not None and principal.caller != ""
        self._waiting.append(
            AuditEntry(
                time=self._clock.now(),
                project=principal.project if principal is not None and known else "",
                caller=principal.caller if principal is not None else "",
                api_key=f"apiKeys/{principal.api_key}" if principal is not None and principal.api_key else "",
                method=method[:200],
                resource=resource[:255],
                outcome=outcome,
                peer=peer[:127],
            )
        )
        self._came.set()

    async def run(self) -> None:
        """Write entries as they come, for ever."""
        while True:
            await self._came.wait()
            await asyncio.sleep(_GATHER_S)
            try:
                await self.flush()
            except ServiceError as error:
                log.warning("audit entries wait", entries=len(self._waiting), error=str(error))

    async def flush(self) -> None:
        """Write what waits."""
        async with self._writing:
            while self._waiting:
                batch = list(islice(self._waiting, _BATCH))
                await self._database.run(lambda tx, rows=batch: tx.audit.add(rows))  # type: ignore[misc]
                for _ in batch:
                    self._waiting.popleft()
            self._came.clear()
        if self._dropped:
            log.error("audit entries were dropped: too many calls at once", entries=self._dropped)
            dropped, self._dropped = self._dropped, 0
            self.add(None, "", "", f"DROPPED_{dropped}", "")

    def forget(self, tx: Transaction) -> None:
        """Delete what is too old or too much."""
        tx.audit.forget(self._clock.now() - self._keep, self._most)

    def page(
        self, tx: Transaction, asked: AuditFilter, before: int | None, size: int
    ) -> Sequence[AuditEntry]:
        return tx.audit.page(asked, before, size)
