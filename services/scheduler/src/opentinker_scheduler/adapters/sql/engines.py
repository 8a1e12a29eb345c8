"""How the database is reached: one connection, transactions of the right kind, typed errors.

SQLite has one writer. SQLAlchemy's default driver mode begins transactions late and so loses updates; here
the driver is left in autocommit and `BEGIN IMMEDIATE` is sent by hand. PostgreSQL ends by itself what a
scheduler that stands still left open, so that nobody waits for it.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.pool import QueuePool, StaticPool

from opentinker_kit.errors import ServiceError
from opentinker_kit.settings import read_secret
from opentinkerapi.runtime.reasons import Reason

POSTGRESQL = "postgresql"
LEASE_S = 12.0
"""For how long the leadership of a PostgreSQL database is leased. With what else a fail-over takes, it is
done within 20 s."""

_CONNECT_S = 5
_RETRY_AFTER_S = 1.0
_DISK_FULL = "53100"
_STOOD_STILL = "25P03"
"""PostgreSQL ended a transaction that did nothing for too long, and its connection."""
_TCP = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
"""A database whose machine is gone is noticed within some ten seconds, also in the middle of a query."""


@dataclass(frozen=True, slots=True)
class Postgres:
    """A PostgreSQL database, which schedulers share: one leads, the others stand by."""

    url: str
    """`postgresql://user@host:port/database`."""
    password_file: Path | None = None
    lease_s: float = LEASE_S


Location = Path | Postgres
"""A file is SQLite's."""


def open_engine(where: Location) -> Engine:
    """The engine of a database; connects at the first use."""
    return postgres_engine(where) if isinstance(where, Postgres) else sqlite_engine(where)


def is_postgres(connection: Connection) -> bool:
    return connection.dialect.name == POSTGRESQL


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


def postgres_engine(where: Postgres) -> Engine:
    """An engine with one connection, made anew when it breaks."""
    # A scheduler that is stopped in the middle of a transaction holds its locks. They end before its
    # leadership does: whoever takes over need not wait for them.
    idle_ms = round(where.lease_s * 750)
    options = f"-c idle_in_transaction_session_timeout={idle_ms} -c lock_timeout=5000"
    engine = create_engine(
        make_url(where.url).set(drivername="postgresql+psycopg"),
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        isolation_level="READ COMMITTED",
        connect_args={"connect_timeout": _CONNECT_S, "options": options, **_TCP},
    )

    @event.listens_for(engine, "do_connect")
    def _password(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        if where.password_file is not None:
            try:
                parameters["password"] = read_secret(where.password_file)
            except (OSError, ValueError) as error:
                raise ServiceError(Reason.STORAGE_UNAVAILABLE, f"the database's password: {error}") from error

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _without_nul(
        _connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
    ) -> tuple[str, Any]:
        return statement, _clean(parameters)

    return engine


def is_broken(error: BaseException) -> bool:
    """Whether the database failed, not the statement: what was being committed is there, or is not."""
    return isinstance(error, OperationalError | InterfaceError) or connection_lost(error)


def typed(error: Exception) -> Exception:
    """What callers are told about a failure of the database; other exceptions as they are."""
    if not isinstance(error, DBAPIError) or not is_broken(error):
        return error
    why = str(error.orig).strip().partition("\n")[0] or type(error.orig).__name__
    if getattr(error.orig, "sqlstate", None) == _DISK_FULL or "disk is full" in why:
        return ServiceError(Reason.STORAGE_FULL, "the database's disk is full; nothing was changed")
    text = f"the database does not answer: {why}"
    return ServiceError(Reason.STORAGE_UNAVAILABLE, text, retry_after_s=_RETRY_AFTER_S)


def connection_lost(error: BaseException) -> bool:
    """Whether the connection was found closed; the next use makes a new one."""
    if not isinstance(error, DBAPIError):
        return False
    return error.connection_invalidated or getattr(error.orig, "sqlstate", None) == _STOOD_STILL


def _clean(parameters: Any) -> Any:
    """PostgreSQL keeps no NUL in a text, and logs of processes may hold some."""
    if isinstance(parameters, str):
        return parameters.replace("\0", "\ufffd")
    if isinstance(parameters, dict):
        return {name: _clean(value) for name, value in parameters.items()}
    if isinstance(parameters, list | tuple):
        return type(parameters)(_clean(value) for value in parameters)
    return parameters
