"""Repositories of accounts and of the audit log."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from opentinker_kit.auth import Role
from opentinker_scheduler.account_ports import AuditFilter, NameTaken
from opentinker_scheduler.adapters.sql import account_tables as tables
from opentinker_scheduler.adapters.sql.tables import columns, serial
from opentinker_scheduler.domain.accounts import ApiKey, AuditEntry, Member, Project, User


class SqlAccounts:
    """See `ports.AccountRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add_user(self, user: User) -> User:
        return replace(user, seq=self._add(tables.users, user))

    def find_user(self, user_id: str) -> User | None:
        row = self._one(select(tables.users).where(tables.users.c.id == user_id))
        return None if row is None else User(**row._mapping)

    def save_user(self, user: User) -> None:
        change = update(tables.users).where(tables.users.c.id == user.id)
        done = self._connection.execute(change.values(display_name=user.display_name, disabled=user.disabled))
        if done.rowcount != 1:
            raise KeyError(user.id)

    def page_users(self, after: int | None, size: int) -> Sequence[User]:
        query = select(tables.users).order_by(tables.users.c.seq).limit(size)
        if after is not None:
            query = query.where(tables.users.c.seq > after)
        return [User(**row._mapping) for row in self._connection.execute(query)]

    def add_project(self, project: Project) -> Project:
        return replace(project, seq=self._add(tables.projects, project))

    def find_project(self, project_id: str) -> Project | None:
        row = self._one(select(tables.projects).where(tables.projects.c.id == project_id))
        return None if row is None else Project(**row._mapping)

    def page_projects(self, after: int | None, size: int) -> Sequence[Project]:
        query = select(tables.projects).order_by(tables.projects.c.seq).limit(size)
        if after is not None:
            query = query.where(tables.projects.c.seq > after)
        return [Project(**row._mapping) for row in self._connection.execute(query)]

    def put_member(self, member: Member) -> None:
        self.drop_member(member.project, member.user_id)
        self._connection.execute(insert(tables.members).values(asdict(member)))

    def drop_member(self, project: str, user_id: str) -> None:
        table = tables.members
        self._connection.execute(delete(table).where(table.c.project == project, table.c.user_id == user_id))

    def find_member(self, project: str, user_id: str) -> Member | None:
        table = tables.members
        row = self._one(select(table).where(table.c.project == project, table.c.user_id == user_id))
        return None if row is None else _member(row)

    def page_members(self, project: str, after: str | None, size: int) -> Sequence[Member]:
        table = tables.members
        query = select(table).where(table.c.project == project).order_by(table.c.user_id).limit(size)
        if after is not None:
            query = query.where(table.c.user_id > after)
        return [_member(row) for row in self._connection.execute(query)]

    def add_key(self, key: ApiKey) -> ApiKey:
        return replace(key, seq=self._add(tables.api_keys, key))

    def find_key(self, key_id: str) -> ApiKey | None:
        row = self._one(select(tables.api_keys).where(tables.api_keys.c.id == key_id))
        return None if row is None else _key(row)

    def find_key_by_hash(self, sha256: str) -> ApiKey | None:
        row = self._one(select(tables.api_keys).where(tables.api_keys.c.sha256 == sha256))
        return None if row is None else _key(row)

    def revoke_key(self, key_id: str, time: datetime) -> None:
        table = tables.api_keys
        change = update(table).where(table.c.id == key_id, table.c.revoke_time.is_(None))
        self._connection.execute(change.values(revoke_time=time))

    def page_keys(self, project: str, user_id: str, before: int | None, size: int) -> Sequence[ApiKey]:
        table = tables.api_keys
        query = select(table).where(table.c.project == project).order_by(table.c.seq.desc()).limit(size)
        if user_id:
            query = query.where(table.c.user_id == user_id)
        if before is not None:
            query = query.where(table.c.seq < before)
        return [_key(row) for row in self._connection.execute(query)]

    def _add(self, table: Any, record: Any) -> int:
        values = {name: getattr(record, name) for name in columns(table)}
        try:
            return serial(self._connection.execute(insert(table).values(values)))
        except IntegrityError as error:
            raise NameTaken(record.display_name) from error

    def _one(self, query: Any) -> Row[Any] | None:
        return self._connection.execute(query).one_or_none()


class SqlAudit:
    """See `ports.AuditRepository`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def add(self, entries: Sequence[AuditEntry]) -> None:
        names = columns(tables.audit)
        rows = [{name: getattr(entry, name) for name in names} for entry in entries]
        if rows:
            self._connection.execute(insert(tables.audit), rows)

    def page(self, asked: AuditFilter, before: int | None, size: int) -> Sequence[AuditEntry]:
        table = tables.audit
        query = select(table).order_by(table.c.seq.desc()).limit(size)
        if asked.project is not None:
            query = query.where(table.c.project == asked.project)
        if asked.caller:
            query = query.where(table.c.caller == asked.caller)
        if asked.method:
            query = query.where(table.c.method == asked.method)
        if asked.start_time is not None:
            query = query.where(table.c.time >= asked.start_time)
        if before is not None:
            query = query.where(table.c.seq < before)
        return [AuditEntry(**row._mapping) for row in self._connection.execute(query)]

    def forget(self, before: datetime, keep: int) -> None:
        table = tables.audit
        newest = self._connection.execute(select(func.max(table.c.seq))).scalar() or 0
        self._connection.execute(
            delete(table).where((table.c.time < before) | (table.c.seq <= newest - keep))
        )


def _member(row: Row[Any]) -> Member:
    return Member(row.project, row.user_id, Role(row.role))


def _key(row: Row[Any]) -> ApiKey:
    return ApiKey(**{**row._mapping, "role": Role(row.role)})
