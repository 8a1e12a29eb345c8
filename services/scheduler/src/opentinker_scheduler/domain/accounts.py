"""Users, projects, members and keys: who may do what, as rules over records."""

from dataclasses import dataclass
from datetime import datetime

from opentinker_kit.auth import Role
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.names import MAX_NAME, check_text
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class User:
    """A person, or a program with keys of its own."""

    id: str
    display_name: str
    disabled: bool
    create_time: datetime
    seq: int = 0

    @property
    def name(self) -> str:
        return f"users/{self.id}"


@dataclass(frozen=True, slots=True)
class Project:
    """A tenant."""

    id: str
    display_name: str
    create_time: datetime
    seq: int = 0

    @property
    def name(self) -> str:
        return f"projects/{self.id}"


@dataclass(frozen=True, slots=True)
class Member:
    """A user's part in a project."""

    project: str
    user_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that opens one project for one user; of the key itself there is a hash."""

    id: str
    sha256: str
    project: str
    user_id: str
    role: Role
    """The most that it may do."""
    display_name: str
    create_time: datetime
    expire_time: datetime | None = None
    revoke_time: datetime | None = None
    seq: int = 0

    @property
    def name(self) -> str:
        return f"apiKeys/{self.id}"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One call that changed something or was refused."""

    time: datetime
    project: str
    caller: str
    api_key: str
    method: str
    resource: str
    outcome: str
    peer: str
    seq: int = 0


def check_display_name(text: str, field: str) -> str:
    """The name without space around it. INVALID_FIELD for none, for too long a one, and for line breaks."""
    name = text.strip()
    if not name or not name.isprintable():
        raise ServiceError(
            Reason.INVALID_FIELD, f"{text!r} is no name: one line that people can read", field=field
        )
    check_text(name, MAX_NAME, field)
    return name


def effective_role(key: ApiKey, user: User | None, member: Member | None, now: datetime) -> Role:
    """What a key may do now. UNAUTHENTICATED, saying why, for one that may do nothing any more."""
    why = ""
    if key.revoke_time is not None:
        why = f"was revoked at {_text(key.revoke_time)}"
    elif key.expire_time is not None and key.expire_time <= now:
        why = f"expired at {_text(key.expire_time)}"
    elif user is None or user.disabled:
        why = "is of a user who is disabled"
    elif member is None:
        why = "is of a user who is no member of its project any more"
    if why or member is None:
        raise ServiceError(Reason.UNAUTHENTICATED, f"the API key {why}")
    return min(key.role, member.role, key=lambda role: role.rank)


def _text(time: datetime) -> str:
    return time.isoformat(timespec="seconds")
