"""The tables of what was used."""

from sqlalchemy import BigInteger, Column, Float, Index, String, Table

from opentinker_scheduler.adapters.sql.tables import Serial, metadata


def _used() -> list[Column[float] | Column[int]]:
    return [
        Column("slot_seconds", Float, nullable=False),
        Column("gpu_seconds", Float, nullable=False),
        Column("tokens_trained", BigInteger, nullable=False, server_default="0"),
        Column("tokens_sampled", BigInteger, nullable=False, server_default="0"),
    ]


usage = Table(
    "usage",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("day", String(10), primary_key=True),
    *_used(),
)

job_usage = Table(
    "job_usage",
    metadata,
    Column("seq", Serial, primary_key=True, autoincrement=True),
    Column("job_id", String(63), nullable=False, unique=True),
    Column("project", String(63), nullable=False),
    *_used(),
    sqlite_autoincrement=True,
)
Index("ix_job_usage_project", job_usage.c.project, job_usage.c.seq)

counted_tokens = Table(
    "counted_tokens",
    metadata,
    Column("server_id", String(63), primary_key=True),
    Column("job_id", String(63), primary_key=True),
    Column("trained", BigInteger, nullable=False),
    Column("sampled", BigInteger, nullable=False),
)
"""What servers said that is part of the usage already."""
