"""The database: one connection in one thread, which every transaction goes through.

SQLite has one writer. SQLAlchemy's default driver mode begins transactions late and so loses updates; here
the driver is left in autocommit and `BEGIN IMMEDIATE` is sent by hand. Each transaction starts by comparing
the epoch: when another scheduler took over, this one may write nothing more.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select, text, update
from sqlalchemy.pool import StaticPool

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.adapters.sql import tables
from opentinker_scheduler.adapters.sql.accounts import SqlAccounts, SqlAudit
from opentinker_scheduler.adapters.sql.capacity import Live, SqlAssignments, SqlJobs, SqlServers
from opentinker_scheduler.adapters.sql.deployments import SqlDeployments
from opentinker_scheduler.adapters.sql.records import SqlBlobs, SqlCatalog, SqlRuns
from opentinker_scheduler.adapters.sql.requests import SqlOutbox, SqlRequests
from opentinker_scheduler.adapters.sql.usage import SqlUsage
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.ports import LeadershipLost, Transaction
from opentinkerapi.runtime.reasons import Reason

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

MIGRATIONS = Path(__file__).parent / "migrations"
HEAD = "0007"
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
    """A SQLite database in a file. `open` it before use; one leader at a time."""

    def __init__(self, path: Path, on_commit: OnCommit = lambda change: None) -> None:
        self._path = path
        self._on_commit = on_commit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql")
        self._engine: Engine | None = None
        self._live = Live()
        self._epoch = 0
        self.cluster = ""
        """Identity of the cluster, made with its database."""

    async def open(self, now: datetime) -> None:
        """Make or migrate the database and become its leader."""
        await self._in_thread(lambda: self._open(now))

    async def run(self, work: Callable[[Transaction], T]) -> T:
        loop = asyncio.get_running_loop()

        def run() -> T:
            result, change = self._run(work)
            if change:
                # Also where nobody waits for the result any more: the change is made, and others wait for it.
                loop.call_soon_threadsafe(self._on_commit, change)
            return result

        return await self._in_thread(run)

    async def close(self) -> None:
        """Finish what was begun and let go of the file."""
        if self._engine is not None:
            await self._in_thread(self._engine.dispose)
        self._thread.shutdown(wait=False)

    @property
    def epoch(self) -> int:
        """Grows with each leader."""
        return self._epoch

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _open(self, now: datetime) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._engine = sqlite_engine(self._path)
        migrate(self._engine)
        with self._engine.begin() as connection:
            row = connection.execute(select(tables.leader)).one_or_none()
            self._epoch = row.epoch + 1 if row else 1
            self.cluster = row.cluster if row else new_id("c")
            values = {"id": 1, "epoch": self._epoch, "cluster": self.cluster, "start_time": now}
            change = update(tables.leader).values(values) if row else insert(tables.leader).values(values)
            connection.execute(change)
            # In the transaction that made this the leader: nobody else writes any more.
            self._live.load(connection)

    def _run(self, work: Callable[[Transaction], T]) -> tuple[T, Committed]:
        try:
            with self._begin() as connection:
                epoch = connection.execute(select(tables.leader.c.epoch)).scalar_one()
                if epoch != self._epoch:
                    text = f"epoch {epoch} leads this database; this scheduler has {self._epoch}"
                    raise LeadershipLost(text)
                transaction = SqlTransaction(connection, self._live)
                result = work(transaction)
        except BaseException:
            self._live.roll_back()
            raise
        self._live.commit()
        jobs = transaction.jobs
        return result, Committed(frozenset(jobs.touched), frozenset(jobs.told), transaction.outbox.touched)

    def _begin(self) -> AbstractContextManager[Connection]:
        if self._engine is None:
            raise ServiceError(
                Reason.SERVER_STARTING, "the scheduler is opening its database", retry_after_s=0.5
            )
        return self._engine.begin()


def sqlite_engine(path: Path) -> Engine:
    """An engine whose transactions are SQLite's: immediate, durable, one writer."""
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"check_same_thread": False, "isolation_level": None, "timeout": 10.0},
    )

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        with contextlib.closing(connection.cursor()) as cursor:
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
                cursor.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def migrate(engine: Engine) -> None:
    """Bring the schema to the newest revision. Raises if the database is of a newer program."""
    with engine.begin() as connection:
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
