"""Who leads: one row, whose epoch grows with each leader. Who finds another epoch there than its own was
replaced and writes nothing.

On SQLite whoever opens the file leads: there is one scheduler, and it was started anew. On PostgreSQL the row
is a lease as well, renewed by its holder and given to another when it is over. A lock of a session would be
simpler and is not enough: a leader that stands still (SIGSTOP, a frozen machine) keeps its connection and
with it the lock, for ever. Times are the database's alone, so clocks of replicas may differ. An early
take-over, by a clock that jumps, costs a fail-over and nothing else: it is the epoch that protects the rows.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, Row, insert, literal_column, select, text, update

from opentinker_scheduler.adapters.sql.engines import is_postgres
from opentinker_scheduler.adapters.sql.tables import leader
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.replica_ports import LeadershipLost, Replica

_NOW_US: Any = literal_column("CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)", BigInteger)
_WROTE = text("pg_current_xact_id_if_assigned() IS NOT NULL")
_ONE_AT_A_TIME = text("SELECT pg_advisory_xact_lock(7203516942061)")


@dataclass(frozen=True, slots=True)
class Claim:
    """What came of wanting to lead."""

    epoch: int
    """0 where another leads."""
    cluster: str
    address: str
    """Of the leader."""


def alone(connection: Connection) -> None:
    """One replica at a time goes on from here to the end of its transaction: schemas are made once."""
    if is_postgres(connection):
        connection.execute(_ONE_AT_A_TIME)


def other_leader(connection: Connection, me: Replica) -> str | None:
    """The address of another scheduler that leads now; None where nobody does, or this one did."""
    if not is_postgres(connection):
        return None
    left = (leader.c.lease_until - _NOW_US).label("left")
    row = connection.execute(select(leader.c.holder, leader.c.address, left)).one_or_none()
    if row is None or row.left <= 0 or (me.name and row.holder == me.name):
        return None
    return str(row.address)


def claim(connection: Connection, me: Replica, now: datetime, lease_s: float) -> Claim:
    """Become the leader unless another one is; call `alone` before."""
    if (address := other_leader(connection, me)) is not None:
        return Claim(0, "", address)
    row: Row[Any] | None = connection.execute(select(leader).with_for_update()).one_or_none()
    epoch, cluster = (row.epoch + 1, row.cluster) if row is not None else (1, new_id("c"))
    values = {"id": 1, "epoch": epoch, "cluster": cluster, "start_time": now}
    values |= {"holder": me.name, "address": me.address, "lease_until": _until(connection, lease_s)}
    change = insert(leader).values(values) if row is None else update(leader).values(values)
    connection.execute(change)
    return Claim(epoch, cluster, me.address)


def check(connection: Connection, mine: int) -> None:
    """LeadershipLost if another scheduler leads. Every transaction begins with it."""
    _compare(connection.execute(select(leader.c.epoch)).scalar_one(), mine)


def confirm(connection: Connection, mine: int) -> None:
    """LeadershipLost if another scheduler leads; until the commit none can begin to. Every transaction on
    PostgreSQL ends with it, and those that wrote nothing lock nothing: a lock is a write, which would have
    every read wait for the disk. SQLite has locked the file since the beginning.
    """
    if is_postgres(connection):
        query = select(leader.c.epoch).where(_WROTE).with_for_update(read=True)
        if (epoch := connection.execute(query).scalar_one_or_none()) is not None:
            _compare(epoch, mine)


def renew(connection: Connection, mine: int, lease_s: float) -> None:
    """Lead on. LeadershipLost if another scheduler does."""
    change = update(leader).where(leader.c.epoch == mine)
    if connection.execute(change.values(lease_until=_until(connection, lease_s))).rowcount != 1:
        check(connection, mine)


def release(connection: Connection, mine: int) -> None:
    """Let another scheduler lead at once; nothing if one does already."""
    connection.execute(update(leader).where(leader.c.epoch == mine).values(lease_until=0))


def _compare(epoch: int, mine: int) -> None:
    if epoch != mine:
        raise LeadershipLost(f"epoch {epoch} leads this database; this scheduler has {mine}")


def _until(connection: Connection, lease_s: float) -> Any:
    return _NOW_US + round(lease_s * 1e6) if is_postgres(connection) else 0
