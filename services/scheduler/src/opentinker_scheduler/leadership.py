"""Leading a database that others want to lead too: keep the lease, and step back where it cannot be kept.

Another scheduler may lead as soon as the lease is over. So this one then says NOT_SERVING and ends its
sessions, by its own clock and whether or not the database can be asked: a server that goes on renewing its
lease here would be given up there. It serves again if nobody took over. If somebody did it ends, and whoever
started it starts it again, to stand by: what is in its memory belongs to an epoch that is over, and nothing
forgets as thoroughly as a process that exits.
"""

import asyncio
import contextlib

import structlog

from opentinker_kit.errors import ServiceError
from opentinker_kit.server import KitServer
from opentinker_scheduler.application.sessions import Sessions
from opentinker_scheduler.replica_ports import LeadershipLost, SharedDatabase

log = structlog.get_logger()

_RENEWALS = 4
"""The lease is renewed so many times while it lasts."""
_LOOK_EVERY_S = 0.5


class Leadership:
    """`keep` it from when the database was opened."""

    def __init__(self, database: SharedDatabase, sessions: Sessions, server: KitServer) -> None:
        self._database = database
        self._sessions = sessions
        self._server = server

    async def keep(self) -> None:
        """Renew the lease until cancelled. LeadershipLost if another took over."""
        lease_s = self._database.lease_s
        if lease_s is None:
            return
        watching = asyncio.create_task(self._watch(), name="lease")
        try:
            while True:
                await asyncio.sleep(lease_s / _RENEWALS)
                try:
                    await self._database.renew()
                except LeadershipLost:
                    raise
                except ServiceError as error:
                    log.warning("the leadership is not renewed", error=error.message)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

    async def _watch(self) -> None:
        """Serve while this scheduler leads for all it knows; renewing may hang where the database does."""
        led = True
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if (leads := self._database.leads) != led:
                led = leads
                log.warning(
                    "leading again" if leads else "the lease on the leadership is over; stepping back"
                )
                await self._server.set_serving(leads)
            if not leads:
                self._sessions.interrupt("this scheduler lost its database; ask the one that leads")
