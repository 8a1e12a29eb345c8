"""What became of jobs, in SQL."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select

from opentinker_scheduler.adapters.sql.tables import job_history
from opentinker_scheduler.domain.model import Job, JobState
from opentinker_scheduler.domain.records import JobEvent

_MAX_REASON = 500
_ADD = insert(job_history)


class SqlHistory:
    """See `log_ports.HistoryRepository`. What a transaction notes is written together, when it ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._noted: list[dict[str, Any]] = []

    def add(self, job: Job, now: datetime) -> None:
        # A failure's further lines are the end of a server's log, which has a place of its own.
        why = job.error.message.partition("\n")[0] if job.error is not None else job.state_reason
        row = {
            "job_id": job.id,
            "time": now,
            "state": job.state,
            "reason": (why or job.outcome_message)[:_MAX_REASON],
            "attempt": job.attempt,
        }
        self._noted.append(row)

    def write(self) -> None:
        """Write what was noted."""
        if self._noted:
            self._connection.execute(_ADD, self._noted)
            self._noted = []

    def of_job(self, job_id: str, after: int) -> Sequence[JobEvent]:
        self.write()
        table = job_history
        query = select(table).where(table.c.job_id == job_id, table.c.seq > after).order_by(table.c.seq)
        return [
            JobEvent(row.seq, row.time, JobState(row.state), row.reason, row.attempt)
            for row in self._connection.execute(query)
        ]
