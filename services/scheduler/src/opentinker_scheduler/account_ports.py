"""What accounts and the audit log need from a store, as Protocols. Used like those in `ports`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from opentinker_scheduler.domain.accounts import ApiKey, AuditEntry, Member, Project, User


class NameTaken(Exception):
    """The database refused a second user, or project, of one name."""


class AccountRepository(Protocol):
    """Users, projects, members and keys. Adding a second of one name is `NameTaken`."""

    def add_user(self, user: User) -> User: ...

    def find_user(self, user_id: str) -> User | None: ...

    def save_user(self, user: User) -> None:
        """Write a changed user. KeyError if there is none."""
        ...

    def page_users(self, after: int | None, size: int) -> Sequence[User]: ...

    def add_project(self, project: Project) -> Project: ...

    def find_project(self, project_id: str) -> Project | None: ...

    def page_projects(self, after: int | None, size: int) -> Sequence[Project]: ...

    def put_member(self, member: Member) -> None:
        """Make or change a membership."""
        ...

    def drop_member(self, project: str, user_id: str) -> None: ...

    def find_member(self, project: str, user_id: str) -> Member | None: ...

    def page_members(self, project: str, after: str | None, size: int) -> Sequence[Member]: ...

    def add_key(self, key: ApiKey) -> ApiKey: ...

    def find_key(self, key_id: str) -> ApiKey | None: ...

    def find_key_by_hash(self, sha256: str) -> ApiKey | None: ...

    def revoke_key(self, key_id: str, time: datetime) -> None:
        """Revoke a key; one that is revoked already stays as it is."""
        ...

    def page_keys(self, project: str, user_id: str, before: int | None, size: int) -> Sequence[ApiKey]:
        """Those of a project, and where a user is named of that user; newest first."""
        ...


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries of the audit log."""

    project: str | None = None
    """None: of all projects, and those of nobody."""
    caller: str = ""
    method: str = ""
    start_time: datetime | None = None


class AuditRepository(Protocol):
    """What was changed, and what was refused."""

    def add(self, entries: Sequence[AuditEntry]) -> None: ...

    def page(self, asked: AuditFilter, before: int | None, size: int) -> Sequence[AuditEntry]:
        """Newest first."""
        ...

    def forget(self, before: datetime, keep: int) -> None:
        """Delete what is older, and all but the newest `keep`."""
        ...
