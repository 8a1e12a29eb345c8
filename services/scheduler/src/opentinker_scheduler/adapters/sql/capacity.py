"""Repositories of jobs, servers and assignments."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from opentinker_scheduler.adapters.sql.tables import NOT_ENDED, assignments, columns, jobs, serial, servers
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Failure,
    Job,
    JobKind,
    JobState,
    OnClientLoss,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.ports import SlotTaken

_LIVE_JOBS = [state for state in JobState if not state.final]
_LIVE_SERVERS = [state for state in ServerState if not state.ended]


class SqlJobs:
    """See `ports.JobRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.touched: set[str] = set()
        """Ids of the jobs that were written."""

    def add(self, job: Job) -> Job:
        job = replace(job, revision=1)
        self.touched.add(job.id)
        result = self._connection.execute(insert(jobs).values(_job_values(job)))
        return replace(job, seq=serial(result))

    def find(self, job_id: str) -> Job | None:
        row = self._connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return None if row is None else _job(row)

    def save(self, job: Job) -> Job:
        job = replace(job, revision=job.revision + 1)
        self.touched.add(job.id)
        change = update(jobs).where(jobs.c.id == job.id).values(_job_values(job))
        if self._connection.execute(change).rowcount != 1:
            raise KeyError(job.id)
        return job

    def live(self) -> Sequence[Job]:
        query = select(jobs).where(jobs.c.state.in_(_LIVE_JOBS)).order_by(jobs.c.queue_time, jobs.c.seq)
        return [_job(row) for row in self._connection.execute(query)]

    def page(
        self,
        before: int | None,
        size: int,
        states: Collection[JobState],
        project: str | None = None,
    ) -> Sequence[Job]:
        query = select(jobs).order_by(jobs.c.seq.desc()).limit(size)
        if project is not None:
            query = query.where(jobs.c.project == project)
        if before is not None:
            query = query.where(jobs.c.seq < before)
        if states:
            query = query.where(jobs.c.state.in_(list(states)))
        return [_job(row) for row in self._connection.execute(query)]


class SqlServers:
    """See `ports.ServerRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, server: Server) -> Server:
        result = self._connection.execute(insert(servers).values(_server_values(server)))
        return replace(server, seq=serial(result))

    def find(self, server_id: str) -> Server | None:
        row = self._connection.execute(select(servers).where(servers.c.id == server_id)).one_or_none()
        return None if row is None else _server(row)

    def find_instance(self, instance_id: str) -> Server | None:
        query = select(servers).where(servers.c.instance_id == instance_id).order_by(servers.c.seq.desc())
        row = self._connection.execute(query.limit(1)).one_or_none()
        return None if row is None else _server(row)

    def save(self, server: Server) -> None:
        change = update(servers).where(servers.c.id == server.id).values(_server_values(server))
        if self._connection.execute(change).rowcount != 1:
            raise KeyError(server.id)

    def live(self) -> Sequence[Server]:
        query = select(servers).where(servers.c.state.in_(_LIVE_SERVERS)).order_by(servers.c.seq)
        return [_server(row) for row in self._connection.execute(query)]

    def page(self, before: int | None, size: int, include_ended: bool) -> Sequence[Server]:
        query = select(servers).order_by(servers.c.seq.desc()).limit(size)
        if before is not None:
            query = query.where(servers.c.seq < before)
        if not include_ended:
            query = query.where(servers.c.state.in_(_LIVE_SERVERS))
        return [_server(row) for row in self._connection.execute(query)]


class SqlAssignments:
    """See `ports.AssignmentRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, assignment: Assignment) -> None:
        try:
            self._connection.execute(insert(assignments).values(asdict(assignment)))
        except IntegrityError as error:
            text = f"slot {assignment.slot_no} of server {assignment.server_id}, for job {assignment.job_id}"
            raise SlotTaken(text) from error

    def find(self, assignment_id: str) -> Assignment | None:
        query = select(assignments).where(assignments.c.id == assignment_id)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else _assignment(row)

    def save(self, assignment: Assignment) -> None:
        change = update(assignments).where(assignments.c.id == assignment.id).values(asdict(assignment))
        if self._connection.execute(change).rowcount != 1:
            raise KeyError(assignment.id)

    def active(self) -> Sequence[Assignment]:
        return self._select()

    def of_job(self, job_id: str) -> Sequence[Assignment]:
        return self._select(assignments.c.job_id == job_id)

    def of_server(self, server_id: str) -> Sequence[Assignment]:
        return self._select(assignments.c.server_id == server_id)

    def _select(self, *conditions: Any) -> Sequence[Assignment]:
        query = (
            select(assignments)
            # Literally as in the indexes, which make the ended ones cost nothing.
            .where(NOT_ENDED, *conditions)
            .order_by(assignments.c.job_id, assignments.c.slot_index, assignments.c.ordinal)
        )
        return [_assignment(row) for row in self._connection.execute(query)]


def _job_values(job: Job) -> dict[str, Any]:
    values = {name: getattr(job, name) for name in columns(jobs)}
    values["slots"] = [asdict(spec) for spec in job.slots]
    values["labels"] = dict(job.labels)
    values["error"] = None
    if job.error is not None:
        values["error"] = {
            "reason": job.error.reason,
            "message": job.error.message,
            "metadata": dict(job.error.metadata),
        }
    values["crashes"] = [at.timestamp() for at in job.crashes]
    return values


def _job(row: Row[Any]) -> Job:
    values = dict(row._mapping)
    values["kind"] = JobKind(row.kind)
    values["state"] = JobState(row.state)
    values["on_client_loss"] = OnClientLoss(row.on_client_loss)
    values["slots"] = tuple(read_slot(value) for value in row.slots)
    values["error"] = None if row.error is None else Failure(**row.error)
    values["crashes"] = tuple(datetime.fromtimestamp(at, UTC) for at in row.crashes)
    return Job(**values)


def read_slot(value: Mapping[str, Any]) -> SlotSpec:
    """A slot as `asdict` wrote it."""
    return SlotSpec(
        role=Role(value["role"]),
        base_model=value["base_model"],
        tuning=Tuning(value["tuning"]),
        count=value["count"],
        options=ServerOptions(**value["options"]),
        exclusive=value["exclusive"],
    )


def _server_values(server: Server) -> dict[str, Any]:
    values = {name: getattr(server, name) for name in columns(servers)}
    values["options"] = asdict(server.options)
    values["reported"] = asdict(server.reported)
    return values


def _server(row: Row[Any]) -> Server:
    values = dict(row._mapping)
    values["role"] = Role(row.role)
    values["state"] = ServerState(row.state)
    values["options"] = ServerOptions(**row.options)
    values["reported"] = ServerOptions(**row.reported)
    return Server(**values)


def _assignment(row: Row[Any]) -> Assignment:
    values = dict(row._mapping)
    values["role"] = Role(row.role)
    values["state"] = AssignmentState(row.state)
    return Assignment(**values)
