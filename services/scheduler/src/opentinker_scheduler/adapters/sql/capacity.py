"""Repositories of jobs, servers and assignments: rows in tables, those that have not ended in memory too."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from opentinker_scheduler.adapters.sql.live import LiveRows
from opentinker_scheduler.adapters.sql.tables import (
    NOT_ENDED,
    assignments,
    columns,
    device_owners,
    jobs,
    serial,
    servers,
)
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
from opentinker_scheduler.ports import DeviceTaken, SlotTaken

# Made once: SQLAlchemy takes longer to put a statement together than the database takes to run it.
_ADD_JOB, _ADD_SERVER, _ADD_ASSIGNMENT = insert(jobs), insert(servers), insert(assignments)
_SAVE_JOB, _SAVE_SERVER, _SAVE_ASSIGNMENT = (
    update(table).where(table.c.id == bindparam("of")) for table in (jobs, servers, assignments)
)

_LIVE_JOBS = [state for state in JobState if not state.final]
_LIVE_SERVERS = [state for state in ServerState if not state.ended]


class Live:
    """What has not ended, in memory."""

    def __init__(self) -> None:
        self.jobs = LiveRows[Job](lambda row: row.id, lambda row: not row.state.final, project=_project)
        self.servers = LiveRows[Server](lambda row: row.id, lambda row: not row.state.ended)
        self.assignments = LiveRows[Assignment](
            lambda row: row.id,
            lambda row: row.state is not AssignmentState.ENDED,
            job=lambda row: row.job_id,
            server=lambda row: row.server_id,
        )

    def load(self, connection: Connection) -> None:
        """Begin with what the tables have."""
        query = select(jobs).where(jobs.c.state.in_(_LIVE_JOBS))
        self.jobs.load(map(_job, connection.execute(query)))
        servers_query = select(servers).where(servers.c.state.in_(_LIVE_SERVERS))
        self.servers.load(map(_server, connection.execute(servers_query)))
        # Literally as in the indexes, which make the ended ones cost nothing.
        assignments_query = select(assignments).where(NOT_ENDED)
        self.assignments.load(map(_assignment, connection.execute(assignments_query)))

    def commit(self) -> None:
        for rows in (self.jobs, self.servers, self.assignments):
            rows.commit()

    def roll_back(self) -> None:
        for rows in (self.jobs, self.servers, self.assignments):
            rows.roll_back()


def _project(job: Job) -> str:
    return job.project


class SqlJobs:
    """See `ports.JobRepository`."""

    def __init__(self, connection: Connection, live: LiveRows[Job]) -> None:
        self._connection = connection
        self._live = live
        self.touched: set[str] = set()
        """Ids of the jobs that were written."""
        self.told: set[str] = set()
        """Ids of the jobs of which only what they wait for changed."""

    def add(self, job: Job) -> Job:
        job = replace(job, revision=1)
        self.touched.add(job.id)
        result = self._connection.execute(_ADD_JOB, _job_values(job))
        job = replace(job, seq=serial(result))
        self._live.put(job)
        return job

    def find(self, job_id: str) -> Job | None:
        if (live := self._live.find(job_id)) is not None:
            return live
        row = self._connection.execute(select(jobs).where(jobs.c.id == job_id)).one_or_none()
        return None if row is None else _job(row)

    def save(self, job: Job) -> Job:
        job = replace(job, revision=job.revision + 1)
        self.touched.add(job.id)
        if self._connection.execute(_SAVE_JOB, {**_job_values(job), "of": job.id}).rowcount != 1:
            raise KeyError(job.id)
        self._live.put(job)
        return job

    def tell(self, job_id: str, position: int, reason: str, start: datetime | None = None) -> None:
        job = self._live.find(job_id)
        told = (position, reason, start)
        if job is None or (job.queue_position, job.state_reason, job.estimated_start_time) == told:
            return
        self.told.add(job_id)
        self._live.put(
            replace(
                job,
                queue_position=position,
                state_reason=reason,
                estimated_start_time=start,
                revision=job.revision + 1,
            )
        )

    def held(self, number: int) -> Sequence[tuple[JobKind, float]]:
        query = select(jobs.c.kind, jobs.c.held_s).where(jobs.c.end_time.is_not(None), jobs.c.held_s > 0)
        rows = self._connection.execute(query.order_by(jobs.c.seq.desc()).limit(number))
        return [(JobKind(row.kind), row.held_s) for row in rows]

    def unsorted(self) -> Sequence[Job]:
        return self._live.all()

    def live(self) -> Sequence[Job]:
        return sorted(self._live.all(), key=attrgetter("queue_time", "seq"))

    def count(self, project: str) -> int:
        return self._live.count("project", project)

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
        return [self._live.find(row.id) or _job(row) for row in self._connection.execute(query)]


class SqlServers:
    """See `ports.ServerRepository`."""

    def __init__(self, connection: Connection, live: LiveRows[Server]) -> None:
        self._connection = connection
        self._live = live

    def add(self, server: Server) -> Server:
        result = self._connection.execute(_ADD_SERVER, _server_values(server))
        server = replace(server, seq=serial(result))
        if server.devices and not server.state.ended:
            owners = [{"device": device, "server_id": server.id} for device in server.devices]
            try:
                self._connection.execute(insert(device_owners), owners)
            except IntegrityError as error:
                raise DeviceTaken(f"{', '.join(server.devices)} for server {server.id}") from error
        self._live.put(server)
        return server

    def find(self, server_id: str) -> Server | None:
        if (live := self._live.find(server_id)) is not None:
            return live
        row = self._connection.execute(select(servers).where(servers.c.id == server_id)).one_or_none()
        return None if row is None else _server(row)

    def find_instance(self, instance_id: str) -> Server | None:
        query = select(servers).where(servers.c.instance_id == instance_id).order_by(servers.c.seq.desc())
        row = self._connection.execute(query.limit(1)).one_or_none()
        return None if row is None else _server(row)

    def save(self, server: Server) -> None:
        values = {**_server_values(server), "of": server.id}
        if self._connection.execute(_SAVE_SERVER, values).rowcount != 1:
            raise KeyError(server.id)
        if server.devices and server.state.ended:
            owned = device_owners.c.server_id == server.id
            self._connection.execute(delete(device_owners).where(owned))
        self._live.put(server)

    def live(self) -> Sequence[Server]:
        return sorted(self._live.all(), key=lambda server: server.seq)

    def page(self, before: int | None, size: int, include_ended: bool) -> Sequence[Server]:
        query = select(servers).order_by(servers.c.seq.desc()).limit(size)
        if before is not None:
            query = query.where(servers.c.seq < before)
        if not include_ended:
            query = query.where(servers.c.state.in_(_LIVE_SERVERS))
        return [_server(row) for row in self._connection.execute(query)]


class SqlAssignments:
    """See `ports.AssignmentRepository`."""

    def __init__(self, connection: Connection, live: LiveRows[Assignment]) -> None:
        self._connection = connection
        self._live = live

    def add(self, assignment: Assignment) -> None:
        try:
            self._connection.execute(_ADD_ASSIGNMENT, _assignment_values(assignment))
        except IntegrityError as error:
            text = f"slot {assignment.slot_no} of server {assignment.server_id}, for job {assignment.job_id}"
            raise SlotTaken(text) from error
        self._live.put(assignment)

    def find(self, assignment_id: str) -> Assignment | None:
        if (live := self._live.find(assignment_id)) is not None:
            return live
        query = select(assignments).where(assignments.c.id == assignment_id)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else _assignment(row)

    def save(self, assignment: Assignment) -> None:
        values = {**_assignment_values(assignment), "of": assignment.id}
        if self._connection.execute(_SAVE_ASSIGNMENT, values).rowcount != 1:
            raise KeyError(assignment.id)
        self._live.put(assignment)

    def active(self) -> Sequence[Assignment]:
        return self._live.all()

    def of_job(self, job_id: str) -> Sequence[Assignment]:
        found = self._live.group("job", job_id)
        return sorted(found, key=lambda each: (each.slot_index, each.ordinal))

    def of_server(self, server_id: str) -> Sequence[Assignment]:
        return self._live.group("server", server_id)

    def servers_of(self, job_id: str) -> Sequence[str]:
        first = func.min(assignments.c.create_time)
        query = select(assignments.c.server_id).where(assignments.c.job_id == job_id)
        query = query.group_by(assignments.c.server_id).order_by(first, assignments.c.server_id)
        return list(self._connection.execute(query).scalars())


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
    values["devices"] = list(server.devices)
    return values


def _server(row: Row[Any]) -> Server:
    values = dict(row._mapping)
    values["role"] = Role(row.role)
    values["state"] = ServerState(row.state)
    values["options"] = ServerOptions(**row.options)
    values["reported"] = ServerOptions(**row.reported)
    values["devices"] = tuple(row.devices)
    return Server(**values)


def _assignment_values(assignment: Assignment) -> dict[str, Any]:
    return {name: getattr(assignment, name) for name in columns(assignments)}


def _assignment(row: Row[Any]) -> Assignment:
    values = dict(row._mapping)
    values["role"] = Role(row.role)
    values["state"] = AssignmentState(row.state)
    return Assignment(**values)
