"""What the scheduler needs from outside for logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.domain.records import JobEvent


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some of a server's log."""

    data: bytes
    size: int
    """How many bytes the log has by now."""


class HistoryRepository(Protocol):
    """What became of jobs."""

    def add(self, job: Job, now: datetime) -> None:
        """Note where a job stands from now on."""
        ...

    def of_job(self, job_id: str, after: int) -> Sequence[JobEvent]:
        """A job's notes behind the one of a number, oldest first."""
        ...
