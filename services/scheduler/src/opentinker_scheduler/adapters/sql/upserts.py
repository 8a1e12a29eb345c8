"""Inserts that may find their row there already; each dialect has a class of its own for them."""

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

from opentinker_scheduler.adapters.sql.engines import is_postgres


def upsert(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An insert into the table that knows `on_conflict_do_update` and `on_conflict_do_nothing`."""
    return upsert_on(is_postgres(connection), table)


def upsert_on(postgres: bool, table: Table) -> postgresql.Insert | sqlite.Insert:
    """The same for one or the other kind of database."""
    return postgresql.insert(table) if postgres else sqlite.insert(table)
