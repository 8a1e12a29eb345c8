"""Accounts on behalf of their admins: users, projects, members, keys; and whose a key is.

Admins of the project `default` are the cluster's: they make users and projects, and see all of them. Admins
of another project decide about that one; members make keys for themselves. What somebody may not see looks
as if it did not exist.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from opentinker_kit.auth import Kind, Principal, Role, digest_of
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.account_ports import NameTaken
from opentinker_scheduler.domain.accounts import (
    ApiKey,
    Member,
    Project,
    User,
    check_display_name,
    effective_role,
)
from opentinker_scheduler.domain.names import MAX_NAME, check_text, new_id, require
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

KEY_PREFIX = "otk_"
"""Begins the keys of users, so that one is recognised where it should not lie."""
MAX_TTL = timedelta(days=3650)
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class NewKey:
    """What a key is asked for with; empty fields have the defaults of CreateApiKey."""

    project: str
    user: str
    role: Role | None
    display_name: str
    ttl: timedelta | None


class Accounts:
    """See the module's text. Every method is called inside a transaction."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def create_user(self, tx: Transaction, who: Principal, display_name: str) -> User:
        _check_cluster_admin(who)
        name = check_display_name(display_name, "user.display_name")
        try:
            return tx.accounts.add_user(User(new_id("u"), name, False, self._clock.now()))
        except NameTaken:
            raise _taken("user", name, "user.display_name") from None

    def users(self, tx: Transaction, who: Principal, after: int | None, size: int) -> Sequence[User]:
        _check_cluster_admin(who)
        return tx.accounts.page_users(after, size)

    def disable_user(self, tx: Transaction, who: Principal, name: str, *, disabled: bool) -> User:
        """Refuse a user's keys from now on, or take them again."""
        _check_cluster_admin(who)
        user = replace(_user(tx, name, "name"), disabled=disabled)
        tx.accounts.save_user(user)
        return user

    def create_project(self, tx: Transaction, who: Principal, display_name: str) -> Project:
        _check_cluster_admin(who)
        name = check_display_name(display_name, "project.display_name")
        try:
            return tx.accounts.add_project(Project(new_id("p"), name, self._clock.now()))
        except NameTaken:
            raise _taken("project", name, "project.display_name") from None

    def projects(self, tx: Transaction, who: Principal, after: int | None, size: int) -> Sequence[Project]:
        """All for the cluster's admins, the caller's own for others."""
        if who.is_cluster_admin:
            return tx.accounts.page_projects(after, size)
        own = tx.accounts.find_project(who.project)
        return [own] if own is not None and (after is None or own.seq > after) else []

    def project_id(self, tx: Transaction, who: Principal, name: str) -> str:
        """The id of a project that the caller may ask about, by default its own. PROJECT_NOT_FOUND."""
        if not name:
            return who.project
        (project,) = require(name, Reason.PROJECT_NOT_FOUND, "project", "projects")
        visible = who.is_cluster_admin or project == who.project
        if not visible or tx.accounts.find_project(project) is None:
            raise ServiceError(Reason.PROJECT_NOT_FOUND, f"there is no project {name}", field="project")
        return project

    def set_member(self, tx: Transaction, who: Principal, project: str, user: str, role: Role) -> Member:
        member = Member(self.project_id(tx, who, project), _user(tx, user, "user").id, role)
        tx.accounts.put_member(member)
        return member

    def remove_member(self, tx: Transaction, who: Principal, project: str, user: str) -> None:
        """End a membership; USER_NOT_FOUND where there is none."""
        project_id, user_id = self.project_id(tx, who, project), _user_id(user)
        if tx.accounts.find_member(project_id, user_id) is None:
            text = f"{user} is no member of projects/{project_id}"
            raise ServiceError(Reason.USER_NOT_FOUND, text, field="user")
        tx.accounts.drop_member(project_id, user_id)

    def members(
        self, tx: Transaction, who: Principal, project: str, after: str | None, size: int
    ) -> Sequence[Member]:
        return tx.accounts.page_members(self.project_id(tx, who, project), after, size)

    def create_key(self, tx: Transaction, who: Principal, asked: NewKey) -> tuple[ApiKey, str]:
        """A key's record, and the key itself, which nobody can be told again."""
        project = self.project_id(tx, who, asked.project)
        user_id = _user_id(asked.user) if asked.user else who.user
        if not user_id:
            text = "name the user: this caller is none"
            raise ServiceError(Reason.INVALID_FIELD, text, field="user")
        manages = who.is_cluster_admin or who.role is Role.ADMIN
        if not manages and user_id != who.user:
            text = "members make keys for themselves; an admin of the project makes those of others"
            raise ServiceError(Reason.PERMISSION_DENIED, text)
        member = tx.accounts.find_member(project, user_id)
        if member is None:
            text = f"users/{user_id} is no member of projects/{project}; SetMember makes one"
            raise ServiceError(Reason.USER_NOT_FOUND, text, field="user")
        # A key makes no stronger one.
        most = member.role if manages else min(member.role, who.role, key=lambda role: role.rank)
        role = asked.role or most
        if role.rank > most.rank:
            text = f"the key can be a {most}'s at most, and {role} was asked for"
            raise ServiceError(Reason.INVALID_FIELD, text, field="role")
        check_text(asked.display_name, MAX_NAME, "display_name")
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        now = self._clock.now()
        key = ApiKey(
            id=new_id("k"),
            sha256=digest_of(secret).hex(),
            project=project,
            user_id=user_id,
            role=role,
            display_name=asked.display_name,
            create_time=now,
            expire_time=_expiry(now, asked.ttl),
        )
        return tx.accounts.add_key(key), secret

    def keys(
        self, tx: Transaction, who: Principal, project: str, before: int | None, size: int
    ) -> Sequence[ApiKey]:
        """Of a project; for who is no admin there, its own."""
        project_id = self.project_id(tx, who, project)
        manages = who.is_cluster_admin or who.role is Role.ADMIN
        if not manages and not who.user:
            return []
        return tx.accounts.page_keys(project_id, "" if manages else who.user, before, size)

    def revoke_key(self, tx: Transaction, who: Principal, name: str) -> ApiKey:
        """API_KEY_NOT_FOUND also for those of others."""
        (key_id,) = require(name, Reason.API_KEY_NOT_FOUND, "API key", "apiKeys")
        key = tx.accounts.find_key(key_id)
        if key is None or not _decides(who, key):
            raise ServiceError(Reason.API_KEY_NOT_FOUND, f"there is no API key {name}", field="name")
        tx.accounts.revoke_key(key.id, self._clock.now())
        revoked = tx.accounts.find_key(key.id)
        assert revoked is not None
        return revoked


class KeyRing:
    """Whose keys are, kept in memory; `forget` after every change of an account."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._known: dict[bytes, tuple[ApiKey, User | None, Member | None] | None] = {}
        self._changes = 0

    async def find(self, sha256: bytes) -> Principal | None:
        """See `auth.KeySource`."""
        if sha256 in self._known:
            found = self._known[sha256]
        else:
            changes = self._changes
            found = await self._database.run(lambda tx: _read(tx, sha256.hex()))
            if changes == self._changes:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                self._known[sha256] = found
        if found is None:
            return None
        key, user, member = found
        role = effective_role(key, user, member, self._clock.now())
        return Principal(Kind.CALLER, project=key.project, role=role, user=key.user_id, api_key=key.id)

    def forget(self) -> None:
        """Look again: something was changed."""
        self._changes += 1
        self._known.clear()


def _read(tx: Transaction, sha256: str) -> tuple[ApiKey, User | None, Member | None] | None:
    key = tx.accounts.find_key_by_hash(sha256)
    if key is None:
        return None
    return key, tx.accounts.find_user(key.user_id), tx.accounts.find_member(key.project, key.user_id)


def _check_cluster_admin(who: Principal) -> None:
    if not who.is_cluster_admin:
        text = "users and projects are made by admins of the project default, who run the cluster"
        raise ServiceError(Reason.PERMISSION_DENIED, text)


def _decides(who: Principal, key: ApiKey) -> bool:
    if who.is_cluster_admin:
        return True
    own = bool(who.user) and key.user_id == who.user
    return key.project == who.project and (own or who.role is Role.ADMIN)


def _user_id(name: str) -> str:
    (user_id,) = require(name, Reason.USER_NOT_FOUND, "user", "users")
    return user_id


def _user(tx: Transaction, name: str, field: str) -> User:
    user = tx.accounts.find_user(_user_id(name))
    if user is None:
        raise ServiceError(Reason.USER_NOT_FOUND, f"there is no user {name}", field=field)
    return user


def _expiry(now: datetime, ttl: timedelta | None) -> datetime | None:
    if ttl is None:
        return None
    if not timedelta(0) < ttl <= MAX_TTL:
        text = f"ttl must be positive and at most {MAX_TTL.days} days; leave it out for a key that stays"
        raise ServiceError(Reason.INVALID_FIELD, text, field="ttl")
    return now + ttl


def _taken(what: str, name: str, field: str) -> ServiceError:
    text = f"there is a {what} {name!r} already"
    return ServiceError(Reason.ALREADY_REGISTERED, text, field=field, metadata={"name": name})
