"""The repository of deployments."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from opentinker_scheduler.adapters.sql import tables
from opentinker_scheduler.adapters.sql.capacity import read_slot
from opentinker_scheduler.domain.records import Deployment

_TABLE = tables.deployments


class SqlDeployments:
    """See `ports.DeploymentRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, deployment: Deployment) -> Deployment:
        result = self._connection.execute(insert(_TABLE).values(_values(deployment)))
        return replace(deployment, seq=tables.serial(result))

    def find(self, project: str, deployment_id: str) -> Deployment | None:
        query = select(_TABLE).where(_TABLE.c.project == project, _TABLE.c.id == deployment_id)
        row = self._connection.execute(query).one_or_none()
        return None if row is None else _deployment(row)

    def save(self, deployment: Deployment) -> None:
        change = update(_TABLE).where(_TABLE.c.seq == deployment.seq).values(_values(deployment))
        if self._connection.execute(change).rowcount != 1:
            raise KeyError(deployment.id)

    def delete(self, deployment: Deployment) -> None:
        self._connection.execute(delete(_TABLE).where(_TABLE.c.seq == deployment.seq))

    def page(self, project: str, before: int | None, size: int) -> Sequence[Deployment]:
        query = select(_TABLE).where(_TABLE.c.project == project).order_by(_TABLE.c.seq.desc()).limit(size)
        if before is not None:
            query = query.where(_TABLE.c.seq < before)
        return [_deployment(row) for row in self._connection.execute(query)]

    def needing(self, model: str) -> str | None:
        # There are few deployments, and this is asked when something is deleted.
        for row in self._connection.execute(select(_TABLE.c.id, _TABLE.c.model, _TABLE.c.history)):
            if any(name == model or name.startswith(f"{model}/") for name in (row.model, *row.history[:1])):
                return f"deployments/{row.id}"
        return None


def _values(deployment: Deployment) -> dict[str, Any]:
    values = {name: getattr(deployment, name) for name in tables.columns(_TABLE)}
    return {**values, "slot": asdict(deployment.slot), "history": list(deployment.history)}


def _deployment(row: Row[Any]) -> Deployment:
    values = dict(row._mapping)
    values["slot"] = read_slot(row.slot)
    values["history"] = tuple(row.history)
    return Deployment(**values)
