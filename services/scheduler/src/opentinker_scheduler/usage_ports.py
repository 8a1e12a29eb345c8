"""What the scheduler needs of a database for usage."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.domain.shares import Used


class UsageRepository(Protocol):
    """What projects used by UTC day ("2026-01-31"), and what jobs used."""

    def add(self, job: Job, day: str, used: Used) -> None:
        """Count something more for a job and its project."""
        ...

    def of_day(self, day: str) -> Mapping[str, Used]:
        """By project."""
        ...

    def page_days(self, project: str, before: str | None, size: int) -> Sequence[tuple[str, Used]]:
        """Days of a project, newest first, those before one."""
        ...

    def page_jobs(self, project: str, before: int | None, size: int) -> Sequence[tuple[int, str, Used]]:
        """Number, id and usage of the jobs of a project that used something, newest first."""
        ...

    def counted(self, server_id: str, job_id: str) -> tuple[int, int]:
        """Tokens trained and sampled on a server for a job, as far as they are part of the usage."""
        ...

    def set_counted(self, server_id: str, job_id: str, trained: int, sampled: int) -> None:
        """So many are part of it now."""
        ...

    def forget_counted(self, live: Collection[str]) -> None:
        """Nothing more is heard from servers that are not among these."""
        ...
