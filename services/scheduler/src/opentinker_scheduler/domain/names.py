"""Resource names: made by the server, checked before anything is looked up or a path is built of them."""

import re
import secrets

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
SHA256 = re.compile(r"[0-9a-f]{64}")


MAX_NAME = 200
"""Characters of a name for people."""


def check_text(text: str, limit: int, field: str) -> None:
    """INVALID_FIELD for a text of more characters than are kept."""
    if len(text) > limit:
        message = f"{field} has {len(text)} characters; at most {limit} are kept"
        raise ServiceError(Reason.INVALID_FIELD, message, field=field)


def new_id(prefix: str = "") -> str:
    """A fresh id of lower-case letters and digits, 80 bits of chance."""
    return f"{prefix}{secrets.token_hex(10)}"


def valid_id(text: str) -> bool:
    """Whether a text can be a resource's id."""
    return _ID.fullmatch(text) is not None


def split(name: str, *collections: str) -> tuple[str, ...] | None:
    """The ids in a name, `p` and `3` in `policies/p/versions/3`; None if it is no such name."""
    parts = name.split("/")
    if len(parts) != 2 * len(collections):
        return None
    ids = tuple(parts[1::2])
    if tuple(parts[0::2]) != collections or not all(valid_id(item) for item in ids):
        return None
    return ids


def require(name: str, reason: Reason, what: str, *collections: str) -> tuple[str, ...]:
    """`split`, with a NOT_FOUND of the given reason where the name cannot exist."""
    ids = split(name, *collections)
    if ids is None:
        pattern = "/".join(f"{collection}/{{id}}" for collection in collections)
        raise ServiceError(reason, f"{name!r} is no {what} name; they look like {pattern}", field="name")
    return ids
