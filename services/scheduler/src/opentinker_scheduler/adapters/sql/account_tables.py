"""The tables of accounts and of the audit log. Of an API key there is a hash and nothing else."""

from sqlalchemy import Boolean, Column, Index, String, Table

from opentinker_scheduler.adapters.sql.tables import Serial, UtcTime, metadata, ordered


def _serial() -> Column[int]:
    return Column("seq", Serial, primary_key=True, autoincrement=True)


users = Table(
    "users",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("display_name", String(200), nullable=False, unique=True),
    Column("disabled", Boolean, nullable=False),
    Column("create_time", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)

projects = Table(
    "projects",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("display_name", String(200), nullable=False, unique=True),
    Column("create_time", UtcTime, nullable=False),
    sqlite_autoincrement=True,
)

members = Table(
    "members",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("user_id", ordered(63), primary_key=True),
    Column("role", String(20), nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    _serial(),
    Column("id", String(63), nullable=False, unique=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("project", String(63), nullable=False),
    Column("user_id", String(63), nullable=False),
    Column("role", String(20), nullable=False),
    Column("display_name", String(200), nullable=False),
    Column("create_time", UtcTime, nullable=False),
    Column("expire_time", UtcTime),
    Column("revoke_time", UtcTime),
    sqlite_autoincrement=True,
)

audit = Table(
    "audit",
    metadata,
    _serial(),
    Column("time", UtcTime, nullable=False),
    Column("project", String(63), nullable=False),
    Column("caller", String(80), nullable=False),
    Column("api_key", String(80), nullable=False),
    Column("method", String(200), nullable=False),
    Column("resource", String(255), nullable=False),
    Column("outcome", String(63), nullable=False),
    Column("peer", String(127), nullable=False),
    sqlite_autoincrement=True,
)
Index("ix_audit_project", audit.c.project, audit.c.seq)
Index("ix_audit_time", audit.c.time)
