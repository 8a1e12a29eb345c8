"""Repositories of the catalog, of runs and of blobs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Table, delete, insert, select, update

from opentinker_scheduler.adapters.sql import tables
from opentinker_scheduler.adapters.sql.upserts import upsert
from opentinker_scheduler.domain.model import Tuning
from opentinker_scheduler.domain.records import (
    Artifact,
    Blob,
    Checkpoint,
    Groups,
    LoopState,
    MetricsRow,
    Policy,
    Run,
    RunState,
    Version,
)


class SqlCatalog:
    """See `ports.CatalogRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add_policy(self, policy: Policy) -> Policy:
        values = _values(policy, tables.policies)
        # A seed is an unsigned 64-bit number; SQL integers are signed.
        values["seed"] = str(policy.seed)
        result = self._connection.execute(insert(tables.policies).values(values))
        return replace(policy, seq=tables.serial(result))

    def find_policy(self, policy_id: str) -> Policy | None:
        query = select(tables.policies).where(tables.policies.c.id == policy_id)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else _policy(row)

    def page_policies(
        self, before: int | None, size: int, job_id: str, project: str | None = None
    ) -> Sequence[Policy]:
        query = select(tables.policies).order_by(tables.policies.c.seq.desc()).limit(size)
        if project is not None:
            query = query.where(tables.policies.c.project == project)
        if before is not None:
            query = query.where(tables.policies.c.seq < before)
        if job_id:
            query = query.where(tables.policies.c.job_id == job_id)
        return [_policy(row) for row in self._connection.execute(query)]

    def policy_names(self, job_id: str) -> Sequence[str]:
        policies = tables.policies
        query = select(policies.c.id).where(policies.c.job_id == job_id).order_by(policies.c.seq)
        return [f"policies/{policy_id}" for policy_id in self._connection.execute(query).scalars()]

    def delete_policy(self, policy_id: str) -> None:
        self._connection.execute(delete(tables.versions).where(tables.versions.c.policy_id == policy_id))
        self._connection.execute(
            delete(tables.checkpoints).where(tables.checkpoints.c.policy_id == policy_id)
        )
        self._connection.execute(delete(tables.policies).where(tables.policies.c.id == policy_id))

    def add_version(self, version: Version) -> None:
        self._connection.execute(insert(tables.versions).values(asdict(version)))
        policies = tables.policies
        newer = policies.c.latest_version < version.version
        change = update(policies).where(policies.c.id == version.policy_id, newer)
        self._connection.execute(change.values(latest_version=version.version))

    def find_version(self, policy_id: str, version: int) -> Version | None:
        versions = tables.versions
        query = select(versions).where(versions.c.policy_id == policy_id, versions.c.version == version)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else Version(**row._mapping)

    def page_versions(self, policy_id: str, before: int | None, size: int) -> Sequence[Version]:
        versions = tables.versions
        query = select(versions).where(versions.c.policy_id == policy_id, ~versions.c.gone)
        query = query.order_by(versions.c.version.desc()).limit(size)
        if before is not None:
            query = query.where(versions.c.version < before)
        return [Version(**row._mapping) for row in self._connection.execute(query)]

    def older_versions(self, policy_id: str, count: int, limit: int) -> Sequence[Version]:
        versions = tables.versions
        query = select(versions).where(
            versions.c.policy_id == policy_id, versions.c.version > 0, ~versions.c.gone
        )
        query = query.order_by(versions.c.version.desc()).offset(count).limit(limit)
        return [Version(**row._mapping) for row in self._connection.execute(query)]

    def mark_gone(self, version: Version) -> None:
        versions = tables.versions
        which = (versions.c.policy_id == version.policy_id, versions.c.version == version.version)
        self._connection.execute(update(versions).where(*which).values(gone=True))

    def add_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        values = _values(checkpoint, tables.checkpoints)
        result = self._connection.execute(insert(tables.checkpoints).values(values))
        return replace(checkpoint, seq=tables.serial(result))

    def find_checkpoint(self, policy_id: str, checkpoint_id: str) -> Checkpoint | None:
        table = tables.checkpoints
        query = select(table).where(table.c.policy_id == policy_id, table.c.id == checkpoint_id)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else Checkpoint(**row._mapping)

    def page_checkpoints(self, policy_id: str, before: int | None, size: int) -> Sequence[Checkpoint]:
        table = tables.checkpoints
        query = select(table).where(table.c.policy_id == policy_id).order_by(table.c.seq.desc()).limit(size)
        if before is not None:
            query = query.where(table.c.seq < before)
        return [Checkpoint(**row._mapping) for row in self._connection.execute(query)]

    def delete_checkpoint(self, policy_id: str, checkpoint_id: str) -> None:
        table = tables.checkpoints
        condition = (table.c.policy_id == policy_id, table.c.id == checkpoint_id)
        self._connection.execute(delete(table).where(*condition))

    def expired_checkpoints(self, now: datetime, limit: int) -> Sequence[Checkpoint]:
        table = tables.checkpoints
        other = table.alias()
        newer = select(other.c.seq).where(other.c.policy_id == table.c.policy_id, other.c.id > table.c.id)
        query = select(table).where(table.c.expire_time <= now, newer.exists())
        query = query.order_by(table.c.expire_time).limit(limit)
        return [Checkpoint(**row._mapping) for row in self._connection.execute(query)]

    def older_checkpoints(self, policy_id: str, count: int, limit: int) -> Sequence[Checkpoint]:
        table = tables.checkpoints
        query = select(table).where(table.c.policy_id == policy_id).order_by(table.c.id.desc())
        query = query.offset(count).limit(limit)
        return [Checkpoint(**row._mapping) for row in self._connection.execute(query)]

    def is_discarded(self, prefix: str) -> bool:
        query = select(tables.garbage.c.prefix).where(tables.garbage.c.prefix == prefix)
        return self._connection.execute(query).one_or_none() is not None

    def discard_objects(self, prefix: str, due: datetime) -> None:
        values = {"prefix": prefix, "due_time": due}
        row = upsert(self._connection, tables.garbage).values(values)
        self._connection.execute(row.on_conflict_do_nothing())

    def discarded_objects(self, now: datetime, limit: int) -> Sequence[str]:
        table = tables.garbage
        query = select(table.c.prefix).where(table.c.due_time <= now).order_by(table.c.due_time).limit(limit)
        return list(self._connection.execute(query).scalars())

    def forget_objects(self, prefix: str) -> None:
        self._connection.execute(delete(tables.garbage).where(tables.garbage.c.prefix == prefix))


class SqlRuns:
    """See `ports.RunRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, run: Run) -> Run:
        result = self._connection.execute(insert(tables.runs).values(_values(run, tables.runs)))
        return replace(run, seq=tables.serial(result))

    def find(self, run_id: str) -> Run | None:
        row = self._connection.execute(select(tables.runs).where(tables.runs.c.id == run_id)).one_or_none()
        return None if row is None else _run(row)

    def save(self, run: Run) -> None:
        change = update(tables.runs).where(tables.runs.c.id == run.id).values(_values(run, tables.runs))
        if self._connection.execute(change).rowcount != 1:
            raise KeyError(run.id)

    def page(self, before: int | None, size: int, project: str | None = None) -> Sequence[Run]:
        query = select(tables.runs).order_by(tables.runs.c.seq.desc()).limit(size)
        if project is not None:
            query = query.where(tables.runs.c.project == project)
        if before is not None:
            query = query.where(tables.runs.c.seq < before)
        return [_run(row) for row in self._connection.execute(query)]

    def put_metrics(self, run_id: str, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            values = {"run_id": run_id, "step": row.step, "values": dict(row.values), "time": row.time}
            self._put(tables.metrics, values, "run_id", "step")

    def page_metrics(self, run_id: str, after: int | None, size: int) -> Sequence[MetricsRow]:
        rows = self._after(tables.metrics, run_id, "step", after, size)
        return [MetricsRow(row["step"], row["values"], row["time"]) for row in rows]

    def put_loop_state(self, run_id: str, state: LoopState) -> None:
        values = {"run_id": run_id, "step": state.step, "checkpoint": state.checkpoint, "state": state.state}
        values["blob"] = None if state.blob is None else asdict(state.blob)
        self._put(tables.loop_states, values, "run_id")

    def find_loop_state(self, run_id: str) -> LoopState | None:
        table = tables.loop_states
        row = self._connection.execute(select(table).where(table.c.run_id == run_id)).one_or_none()
        if row is None:
            return None
        return LoopState(row.step, row.checkpoint, row.state, None if row.blob is None else Blob(**row.blob))

    def run_from(self, checkpoint: str) -> str | None:
        table = tables.loop_states
        query = select(table.c.run_id).where(table.c.checkpoint == checkpoint).limit(1)
        run_id: str | None = self._connection.execute(query).scalar_one_or_none()
        return None if run_id is None else f"runs/{run_id}"

    def put_groups(self, run_id: str, groups: Groups) -> None:
        values = {"run_id": run_id, "step": groups.step, "blob": asdict(groups.blob), "groups": groups.groups}
        self._put(tables.groups, values, "run_id", "step")

    def page_groups(self, run_id: str, after: int | None, size: int) -> Sequence[Groups]:
        rows = self._after(tables.groups, run_id, "step", after, size)
        return [Groups(row["step"], Blob(**row["blob"]), row["groups"]) for row in rows]

    def put_artifact(self, run_id: str, artifact: Artifact) -> None:
        values = {"run_id": run_id, "name": artifact.name, "media_type": artifact.media_type}
        self._put(tables.artifacts, {**values, "blob": asdict(artifact.blob)}, "run_id", "name")

    def page_artifacts(self, run_id: str, after: str | None, size: int) -> Sequence[Artifact]:
        rows = self._after(tables.artifacts, run_id, "name", after, size)
        return [Artifact(row["name"], Blob(**row["blob"]), row["media_type"]) for row in rows]

    def _put(self, table: Table, values: dict[str, Any], *key: str) -> None:
        rest = {name: value for name, value in values.items() if name not in key}
        row = upsert(self._connection, table).values(values)
        self._connection.execute(row.on_conflict_do_update(index_elements=list(key), set_=rest))

    def _after(
        self, table: Table, run_id: str, order: str, after: int | str | None, size: int
    ) -> Sequence[dict[str, Any]]:
        query = select(table).where(table.c.run_id == run_id).order_by(table.c[order]).limit(size)
        if after is not None:
            query = query.where(table.c[order] > after)
        return [dict(row._mapping) for row in self._connection.execute(query)]


class SqlBlobs:
    """See `ports.BlobRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, blob: Blob, now: datetime) -> None:
        values = {"sha256": blob.sha256, "size_bytes": blob.size_bytes, "create_time": now}
        row = upsert(self._connection, tables.blobs).values(values)
        self._connection.execute(row.on_conflict_do_nothing())

    def find(self, sha256: str) -> Blob | None:
        query = select(tables.blobs).where(tables.blobs.c.sha256 == sha256)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else Blob(row.sha256, row.size_bytes, f"blob:{row.sha256}")


def _values(record: Any, table: Table) -> dict[str, Any]:
    """A record's fields as column values; the store gives `seq`."""
    values = {name: getattr(record, name) for name in tables.columns(table)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _policy(row: Row[Any]) -> Policy:
    values = dict(row._mapping)
    values["tuning"] = Tuning(row.tuning)
    values["target_modules"] = tuple(row.target_modules)
    values["seed"] = int(row.seed)
    return Policy(**values)


def _run(row: Row[Any]) -> Run:
    values = dict(row._mapping)
    values["state"] = RunState(row.state)
    return Run(**values)
