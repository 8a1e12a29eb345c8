"""The loop that moves the queue: a tick looks, settles in one transaction, and acts on how things stand then.

Ticks come on a timer and when something happened, and every action follows from the rows, never from having
seen a change: a server in LAUNCHING without a process is started, a process without a live server is ended, a
session is told what it was not told. So a tick that dies half way, or a whole scheduler, loses nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import datetime

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import end_server, save_job
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.placing import Placing
from opentinker_scheduler.application.sessions import Sessions
from opentinker_scheduler.application.settle import Ending, Observed, Settled, settle
from opentinker_scheduler.application.timers import Timers, Timing
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import Failure, JobState, OnClientLoss, Server, ServerState
from opentinker_scheduler.launcher_ports import Launcher, Started
from opentinker_scheduler.ports import Database, Transaction
from opentinker_scheduler.replica_ports import LeadershipLost
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_QUIET_TICK_S = 1.0
"""Ticks are this far apart while nothing waits."""
_LONG_TICK_S = 0.02
"""After a tick that kept the database for longer the loop rests for as long as that."""
_FINISH_S = 2.0
_DATABASE_FAILS = (Reason.STORAGE_UNAVAILABLE, Reason.STORAGE_FULL)

Watcher = Callable[[Settled, float], None]
"""Told how things stand after a tick, and how many seconds it took."""


class Reconciler:
    """See the module's text. `run` it as a task; everything else is called from the same event loop."""

    def __init__(
        self,
        database: Database,
        launcher: Launcher,
        leases: Leases,
        sessions: Sessions,
        placing: Placing,
        timing: Timing,
        clock: Clock,
    ) -> None:
        self._database = database
        self._launcher = launcher
        self._leases = leases
        self._sessions = sessions
        self._placing = placing
        self._timing = timing
        self._clock = clock
        self._timers = Timers(timing)
        self._woken = asyncio.Event()
        self._endings: list[Ending] = []
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        """Those of them that start a server."""
        self._busy_s = 0.0
        """For how long the last tick kept the database."""
        self.watcher: Watcher | None = None

    def wake(self) -> None:
        """Tick now: something happened."""
        self._woken.set()

    def exited(self, server_id: str, exit_code: int | None) -> None:
        """A server's process ended, however."""
        how = "died" if exit_code is None else f"exited with code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"was killed by signal {-exit_code}"
        self._endings.append(Ending(server_id, how, exit_code, self._launcher.log_tail(server_id)))
        self.wake()

    async def adopt(self) -> None:
        """Begin to lead: take over what runs, give every lease one TTL."""

        def read(tx: Transaction) -> Settled:
            return Settled(tx.jobs.live(), tx.servers.live(), tx.assignments.active(), {}, moving=True)

        found = await self._database.run(read)
        running = await self._launcher.adopt([server for server in found.servers if server.launched])
        await self._record(running)
        for server in found.servers:
            started = server.pid != 0 or server.register_time is not None
            if server.launched and started and server.id not in running:
                what = "was gone when the scheduler started again"
                self._endings.append(Ending(server.id, what, counts=False))
            elif server.register_time is not None:
                self._leases.grant_server(server.id)
        for job in found.jobs:
            if job.state is not JobState.PAUSED:
                self._leases.grant_job(job)
        log.info("leading", jobs=len(found.jobs), servers=len(found.servers), processes=len(running))

    async def run(self) -> None:
        """Tick until cancelled. A tick that fails is logged and tried again; a lost leadership is raised."""
        while True:
            self._woken.clear()
            began = self._clock.monotonic()
            try:
                moving = await self.tick()
            except LeadershipLost:
                raise
            except Exception as error:
                if isinstance(error, ServiceError) and error.reason in _DATABASE_FAILS:
                    log.warning("the tick failed; trying again", error=error.message)
                    await asyncio.sleep(_QUIET_TICK_S)
                    # Nobody could come back meanwhile: that takes the database.
                    self._leases.excuse(self._clock.monotonic() - began)
                    continue
                log.exception("the tick failed; trying again")
                await asyncio.sleep(self._timing.tick_s)
                continue
            if self._busy_s > _LONG_TICK_S:
                # Where every call wakes the loop, calls must still get as much of the database as the loop.
                # Not for longer: a process that was stopped in a tick seems to have spent hours on it.
                await asyncio.sleep(min(self._busy_s, _QUIET_TICK_S))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timing.tick_s if moving else _QUIET_TICK_S):
                    await self._woken.wait()

    async def tick(self) -> bool:
        """Look, settle, act; whether something is still on its way."""
        now = self._leases.beat()
        began = time.perf_counter()
        endings = list(self._endings)
        seen = Observed(
            endings=[*endings, *self._unheard(now)],
            lost_clients=self._leases.jobs.over(now),
            overdue=self._timers.overdue(now),
            idle_too_long=self._timers.idle(now),
            attended=self._leases.attended(),
            told=self._sessions.told(),
            waits=self._launcher.waits(),
            nodes=self._launcher.nodes(),
        )
        wall = self._clock.now()
        settled = await self._database.run(lambda tx: self._settle(tx, seen, wall))
        # Only now that it is written: had the transaction failed, the next tick would take them in.
        del self._endings[: len(endings)]
        self._act(settled, now)
        if self.watcher is not None:
            self.watcher(settled, time.perf_counter() - began)
        return settled.moving

    def _settle(self, tx: Transaction, seen: Observed, now: datetime) -> Settled:
        began = time.perf_counter()
        try:
            return settle(tx, seen, self._placing, now)
        finally:
            self._busy_s = time.perf_counter() - began

    async def stop(self, *, stop_servers: bool, grace_s: float) -> None:
        """End orderly: with `stop_servers` jobs are paused and every process that was started ends."""
        # A start under way is waited for: its process would otherwise be nobody's.
        busy = list(self._busy.values())
        if busy:
            await asyncio.wait(busy, timeout=_FINISH_S)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        if stop_servers and self._launcher.can_launch:
            try:
                await self._database.run(self._pause_all)
            except ServiceError as error:
                log.warning("jobs are not paused, their servers end anyway", error=error.message)
            await asyncio.gather(*(self._launcher.stop(i, grace_s) for i in self._launcher.watched()))
        self._launcher.close()

    def _unheard(self, now: float) -> list[Ending]:
        """Servers that stopped renewing, or took too long to come up."""
        ttl_s = self._leases.server_ttl_s
        silent = [(i, f"did not renew its lease for {ttl_s:g} s") for i in self._leases.servers.over(now)]
        return [
            Ending(server_id, what, log_tail=self._launcher.log_tail(server_id))
            for server_id, what in (*silent, *self._timers.late(now))
        ]

    def _act(self, settled: Settled, now: float) -> None:
        for server in settled.servers:
            if not server.launched:
                continue
            if server.state is ServerState.LAUNCHING and not server.pid and not server.instance_id:
                self._starting[server.id] = self._begin(server.id, self._starter(server))
            elif server.state is ServerState.DRAINING:
                self._sessions.drain(server.id, "it has no work")
                self._begin(server.id, self._stopper(server.id, self._timing.stop_grace_s))
        live = {server.id for server in settled.servers}
        for server_id in self._starting.keys() - live:
            # It may wait for room that nobody needs any more.
            self._starting[server_id].cancel()
        for server_id in set(self._launcher.watched()) - live:
            self._begin(server_id, self._stopper(server_id, 0.0))
        for server_id in self._leases.servers.holders() - live:
            self._leases.servers.release(server_id)
            self._sessions.end(server_id, "the lease of this server is over")
        claiming = {job.id: job for job in settled.jobs if job.state is not JobState.PAUSED}
        leased = self._leases.jobs.holders()
        for job_id in leased - claiming.keys():
            self._leases.end_job(job_id)
        # Whoever was recorded by a call that was cut off before it granted the lease gets one TTL.
        for job_id in claiming.keys() - leased:
            self._leases.grant_job(claiming[job_id])
        leased = self._leases.servers.holders()
        for server in settled.servers:
            if server.register_time is not None and server.id not in leased:
                self._leases.grant_server(server.id)
        for assignment_id in self._sessions.sync(settled.assignments, settled.policies):
            self._timers.release_sent(assignment_id, now)
        self._timers.see(settled.servers, settled.assignments, now)

    def _begin(self, server_id: str, work: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """Do something to a server in the background, one thing at a time."""
        if server_id in self._busy:
            return self._busy[server_id]
        task = asyncio.get_running_loop().create_task(work())
        self._busy[server_id] = task

        def done(finished: asyncio.Task[None]) -> None:
            del self._busy[server_id]
            self._starting.pop(server_id, None)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("a server could not be handled", server=server_id, exc_info=error)
            self.wake()

        task.add_done_callback(done)
        return task

    def _starter(self, server: Server) -> Callable[[], Coroutine[None, None, None]]:
        async def start() -> None:
            try:
                started = await self._launcher.start(server)
            except OSError as error:
                log.warning("a server could not be started", server=server.name, error=str(error))
                self._endings.append(Ending(server.id, f"could not be started: {error}"))
                return
            await self._record({server.id: started})

        return start

    def _stopper(self, server_id: str, grace_s: float) -> Callable[[], Coroutine[None, None, None]]:
        async def stop() -> None:
            await self._launcher.stop(server_id, grace_s)

        return stop

    async def _record(self, started: Mapping[str, Started]) -> None:
        """Write down which processes run, so that a successor finds them."""

        def run(tx: Transaction) -> None:
            for server_id, process in started.items():
                server = tx.servers.find(server_id)
                if server is not None and server.pid_start != process.pid_start:
                    tx.servers.save(process.recorded(server))

        if started:
            await self._database.run(run)

    def _pause_all(self, tx: Transaction) -> None:
        now = self._clock.now()
        for job in tx.jobs.live():
            # A detached job has nobody who would resume it: it starts again with the cluster.
            if job.state is not JobState.PAUSED and job.on_client_loss is not OnClientLoss.DETACH:
                reason = "the cluster was stopped; ResumeJob goes on from the last checkpoint"
                save_job(tx, job, rules.paused(job, reason), now)
        for server in tx.servers.live():
            if server.launched:
                draining = replace(server, state=ServerState.DRAINING)
                cause = Failure("", "the cluster was stopped")
                end_server(tx, draining, cause, now, self._placing.terms.budget, counts=False)
