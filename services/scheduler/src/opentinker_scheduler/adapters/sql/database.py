"""The database: one connection in one thread, which every transaction goes through.

Each transaction compares the epoch: when another scheduler took over, this one may write nothing more. Where
the connection broke, the next transaction makes a new one and reads into memory again what the tables have,
for nobody knows whether what was being committed is there.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import structlog
from sqlalchemy import Connection, Engine, inspect, text

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.adapters.sql import leader
from opentinker_scheduler.adapters.sql.accounts import SqlAccounts, SqlAudit
from opentinker_scheduler.adapters.sql.capacity import Live, SqlAssignments, SqlJobs, SqlServers
from opentinker_scheduler.adapters.sql.deployments import SqlDeployments
from opentinker_scheduler.adapters.sql.engines import (
    Location,
    Postgres,
    connection_lost,
    is_broken,
    open_engine,
    typed,
)
from opentinker_scheduler.adapters.sql.history import SqlHistory
from opentinker_scheduler.adapters.sql.records import SqlBlobs, SqlCatalog, SqlRuns
from opentinker_scheduler.adapters.sql.requests import SqlOutbox, SqlRequests
from opentinker_scheduler.adapters.sql.usage import SqlUsage
from opentinker_scheduler.ports import Transaction
from opentinker_scheduler.replica_ports import Replica
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed:
    """What a transaction changed."""

    jobs: frozenset[str]
    """Ids of jobs that were written."""
    told: frozenset[str]
    """Ids of jobs that only wait for something else now."""
    facts: bool
    """Whether facts were recorded."""

    def __bool__(self) -> bool:
        return bool(self.jobs or self.told or self.facts)


OnCommit = Callable[[Committed], None]
"""Called in the event loop after a commit that changed something."""

_NOBODY = Replica()
MIGRATIONS = Path(__file__).parent / "migrations"
HEAD = "0010"
"""The newest revision."""


class SqlTransaction:
    """The repositories over one connection."""

    def __init__(self, connection: Connection, live: Live) -> None:
        self._connection = connection
        self._live = live

    @cached_property
    def jobs(self) -> SqlJobs:
        return SqlJobs(self._connection, self._live.jobs)

    @cached_property
    def servers(self) -> SqlServers:
        return SqlServers(self._connection, self._live.servers)

    @cached_property
    def assignments(self) -> SqlAssignments:
        return SqlAssignments(self._connection, self._live.assignments)

    @cached_property
    def history(self) -> SqlHistory:
        return SqlHistory(self._connection)

    @cached_property
    def usage(self) -> SqlUsage:
        return SqlUsage(self._connection)

    @cached_property
    def catalog(self) -> SqlCatalog:
        return SqlCatalog(self._connection)

    @cached_property
    def deployments(self) -> SqlDeployments:
        return SqlDeployments(self._connection)

    @cached_property
    def runs(self) -> SqlRuns:
        return SqlRuns(self._connection)

    @cached_property
    def blobs(self) -> SqlBlobs:
        return SqlBlobs(self._connection)

    @cached_property
    def requests(self) -> SqlRequests:
        return SqlRequests(self._connection)

    @cached_property
    def outbox(self) -> SqlOutbox:
        return SqlOutbox(self._connection)

    @cached_property
    def accounts(self) -> SqlAccounts:
        return SqlAccounts(self._connection)

    @cached_property
    def audit(self) -> SqlAudit:
        return SqlAudit(self._connection)


class SqlDatabase:
    """A SQLite file, or a PostgreSQL database that schedulers share. `open` it before use."""

    def __init__(self, where: Location, on_commit: OnCommit = lambda change: None) -> None:
        self._where = where
        self._on_commit = on_commit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")
        self._engine: Engine | None = None
        self._live = Live()
        self._doubtful = False
        """What is in memory may not be what the tables have."""
        self._epoch = 0
        self._leader = ""
        self._leads_until = 0.0
        self.cluster = ""
        """Identity of the cluster, made with its database."""

    async def open(self, now: datetime, me: Replica = _NOBODY) -> None:
        """Make or migrate the database and become its leader; while another leads, or a PostgreSQL database
        does not answer, wait.
        """
        began, told = time.monotonic(), ""
        while True:
            asked = time.monotonic()
            at = now + timedelta(seconds=asked - began)
            try:
                if await self._in_thread(lambda at=at: self._try_to_lead(at, me)):  # type: ignore[misc]
                    self._leads_until = asked + (self.lease_s or 0.0)
                    return
                waits_for = f"{self._leader} leads"
            except ServiceError as error:
                if self.lease_s is None:
                    raise
                waits_for = error.message
            if waits_for != told:
                log.info("standing by", because=waits_for)
                told = waits_for
            await asyncio.sleep((self.lease_s or 0.0) / 12)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        loop = asyncio.get_running_loop()

        def run() -> T:
            result, change = self._run(work)
            if change:
                # Also where nobody waits for the result any more: the change is made, and others wait for it.
                loop.call_soon_threadsafe(self._on_commit, change)
            return result

        return await self._in_thread(run)

    async def renew(self) -> None:
        """Lead on for one more lease. LeadershipLost if another took over."""
        asked = time.monotonic()
        lease_s = self.lease_s
        if lease_s is not None:
            await self._in_thread(
                lambda: self._connected(lambda connection: leader.renew(connection, self._epoch, lease_s))
            )
            self._leads_until = asked + lease_s

    async def close(self) -> None:
        """Finish what was begun and let go, of the leadership too."""
        if self._engine is not None:
            await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    @property
    def lease_s(self) -> float | None:
        """For how long the leadership is leased; None where it is nobody else's."""
        return self._where.lease_s if isinstance(self._where, Postgres) else None

    @property
    def leads(self) -> bool:
        """Whether this scheduler leads for all it knows: by its own clock its lease is not over."""
        return self._epoch > 0 and (self.lease_s is None or time.monotonic() < self._leads_until)

    @property
    def epoch(self) -> int:
        """Grows with each leader."""
        return self._epoch

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _try_to_lead(self, now: datetime, me: Replica) -> bool:
        """Whether this is the leader now."""
        if isinstance(self._where, Path):
            self._where.parent.mkdir(parents=True, exist_ok=True)
        self._engine = self._engine or open_engine(self._where)
        claim = self._connected(lambda connection: self._claim(connection, now, me))
        self._leader, self.cluster, self._epoch = claim.address, claim.cluster, claim.epoch
        return claim.epoch > 0

    def _claim(self, connection: Connection, now: datetime, me: Replica) -> leader.Claim:
        # Where another leads nothing is locked, and the schema stays as that one knows it.
        if revision_of(connection) is not None and (other := leader.other_leader(connection, me)) is not None:
            return leader.Claim(0, "", other)
        leader.alone(connection)
        migrate(connection)
        claim = leader.claim(connection, me, now, self.lease_s or 0.0)
        if claim.epoch:
            # In the transaction that made this the leader: nobody else writes any more.
            self._read_anew(connection)
        return claim

    def _run(self, work: Callable[[Transaction], T]) -> tuple[T, Committed]:
        def run(connection: Connection) -> tuple[T, Committed]:
            if self._doubtful:
                self._read_anew(connection)
            transaction = SqlTransaction(connection, self._live)
            result = work(transaction)
            transaction.history.write()
            leader.confirm(connection, self._epoch)
            jobs = transaction.jobs
            change = Committed(frozenset(jobs.touched), frozenset(jobs.told), transaction.outbox.touched)
            return result, change

        try:
            done = self._connected(run, leads=True)
        except BaseException:
            self._live.roll_back()
            raise
        self._live.commit()
        return done

    def _connected(self, work: Callable[[Connection], T], *, leads: bool = False) -> T:
        """Do `work` in a transaction; with `leads` only as the leader. Failures of the database are typed."""
        if self._engine is None or (leads and not self._epoch):
            raise self._not_leading()
        try:
            try:
                return self._transact(self._engine, work, leads)
            except _NotBegun:
                # The connection was closed since its last use, and nothing was done on it yet.
                return self._transact(self._engine, work, leads)
        except _NotBegun as error:
            raise typed(error.cause) from error.cause
        except Exception as error:
            if not is_broken(error):
                raise
            self._doubtful = True
            raise typed(error) from error

    def _transact(self, engine: Engine, work: Callable[[Connection], T], leads: bool) -> T:
        begun = False
        try:
            with engine.begin() as connection:
                if leads:
                    leader.check(connection, self._epoch)
                begun = True
                return work(connection)
        except Exception as error:
            if not begun and connection_lost(error):
                raise _NotBegun(error) from error
            raise

    def _read_anew(self, connection: Connection) -> None:
        self._live = Live()
        self._live.load(connection)
        self._doubtful = False

    def _not_leading(self) -> ServiceError:
        if not self._leader:
            text = "the scheduler is opening its database"
            return ServiceError(Reason.SERVER_STARTING, text, retry_after_s=0.5)
        text = f"this scheduler stands by: {self._leader} leads"
        return ServiceError(
            Reason.SERVER_STARTING, text, metadata={"leader": self._leader}, retry_after_s=0.5
        )

    def _close(self) -> None:
        assert self._engine is not None
        if self._epoch and self.lease_s is not None:
            with contextlib.suppress(ServiceError):
                self._connected(lambda connection: leader.release(connection, self._epoch))
        self._engine.dispose()
        self._engine = None


class _NotBegun(Exception):
    """The connection was found closed before a transaction's work began."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def migrate(connection: Connection) -> None:
    """Bring the schema to the newest revision. Raises if the database is of a newer program."""
    if revision_of(connection) == HEAD:
        return
    # Only here: it takes as long to import as the rest of the scheduler to start.
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, "head")


def revision_of(connection: Connection) -> str | None:
    """The schema's revision; None for an empty database."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision
