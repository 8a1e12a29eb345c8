"""Usage in SQL."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, select

from opentinker_scheduler.adapters.sql.engines import is_postgres
from opentinker_scheduler.adapters.sql.upserts import upsert, upsert_on
from opentinker_scheduler.adapters.sql.usage_tables import counted_tokens, job_usage, usage
from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.domain.shares import Used


class SqlUsage:
    """See `usage_ports.UsageRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, job: Job, day: str, used: Used) -> None:
        self._add(usage, used, ["project", "day"], project=job.project, day=day)
        self._add(job_usage, used, ["job_id"], job_id=job.id, project=job.project)

    def of_day(self, day: str) -> Mapping[str, Used]:
        rows = self._connection.execute(select(usage).where(usage.c.day == day))
        return {row.project: _used(row) for row in rows}

    def page_days(self, project: str, before: str | None, size: int) -> Sequence[tuple[str, Used]]:
        query = select(usage).where(usage.c.project == project).order_by(usage.c.day.desc()).limit(size)
        if before is not None:
            query = query.where(usage.c.day < before)
        return [(row.day, _used(row)) for row in self._connection.execute(query)]

    def page_jobs(self, project: str, before: int | None, size: int) -> Sequence[tuple[int, str, Used]]:
        table = job_usage
        query = select(table).where(table.c.project == project).order_by(table.c.seq.desc()).limit(size)
        if before is not None:
            query = query.where(table.c.seq < before)
        return [(row.seq, row.job_id, _used(row)) for row in self._connection.execute(query)]

    def counted(self, server_id: str, job_id: str) -> tuple[int, int]:
        table = counted_tokens
        query = select(table).where(table.c.server_id == server_id, table.c.job_id == job_id)
        row = self._connection.execute(query).one_or_none()
        return (0, 0) if row is None else (row.trained, row.sampled)

    def set_counted(self, server_id: str, job_id: str, trained: int, sampled: int) -> None:
        counts = {"trained": trained, "sampled": sampled}
        row = upsert(self._connection, counted_tokens).values(server_id=server_id, job_id=job_id, **counts)
        self._connection.execute(
            row.on_conflict_do_update(index_elements=["server_id", "job_id"], set_=counts)
        )

    def forget_counted(self, live: Collection[str]) -> None:
        table = counted_tokens
        known = self._connection.execute(select(table.c.server_id).distinct()).scalars()
        ended = set(known) - set(live)
        if ended:
            self._connection.execute(delete(table).where(table.c.server_id.in_(ended)))

    def _add(self, table: Table, used: Used, key: Sequence[str], **of: str) -> None:
        self._connection.execute(_adding(is_postgres(self._connection), table, tuple(key)), of | asdict(used))


@cache
def _adding(postgres: bool, table: Table, key: Sequence[str]) -> Any:
    """A statement that adds to what is there. Kept, since it takes longer to make than to run."""
    row = upsert_on(postgres, table)
    sums = {each.name: table.c[each.name] + row.excluded[each.name] for each in fields(Used)}
    return row.on_conflict_do_update(index_elements=list(key), set_=sums)


def _used(row: Row[Any]) -> Used:
    return Used(row.slot_seconds, row.gpu_seconds, row.tokens_trained, row.tokens_sampled)
