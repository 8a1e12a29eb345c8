"""Page sizes and page tokens. A token names the method that made it and where the next page begins."""

import base64
import json

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

DEFAULT_SIZE, MAX_SIZE = 100, 1000
_TOO_LARGE = 1 << 63
"""Databases know no such numbers."""


def page_size(asked: int, default: int = DEFAULT_SIZE, maximum: int = MAX_SIZE) -> int:
    """How many items a page has; more than the maximum gives the maximum, as AIP-158 has it."""
    if asked < 0:
        raise ServiceError(Reason.INVALID_FIELD, "page_size must not be negative", field="page_size")
    return min(asked or default, maximum)


def make_token(method: str, scope: str, cursor: int | str) -> str:
    """The token of the page after `cursor`; `scope` holds what the caller must ask again with."""
    text = json.dumps([method, scope, cursor], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_int(method: str, scope: str, token: str) -> int | None:
    """Where the page begins, by number; None for the first. INVALID_PAGE_TOKEN for others' tokens."""
    cursor = _read(method, scope, token)
    if cursor is None or (isinstance(cursor, int) and abs(cursor) < _TOO_LARGE):
        return cursor
    raise invalid_token(method)


def read_text(method: str, scope: str, token: str, *, field: str = "page_token") -> str | None:
    """Where the page begins, by name; None for the first."""
    cursor = _read(method, scope, token, field)
    if cursor is None or isinstance(cursor, str):
        return cursor
    raise invalid_token(method, field)


def _read(method: str, scope: str, token: str, field: str = "page_token") -> int | str | None:
    if not token:
        return None
    try:
        padded = token + "=" * (-len(token) % 4)
        made_by, made_for, cursor = json.loads(base64.urlsafe_b64decode(padded.encode()))
    except (ValueError, TypeError):
        raise invalid_token(method, field) from None
    if made_by != method or made_for != scope or not isinstance(cursor, int | str):
        raise invalid_token(method, field)
    return cursor


def invalid_token(method: str, field: str = "page_token") -> ServiceError:
    """What a token is refused with that says nothing to a method."""
    text = f"{field} was not made by {method} with these arguments; leave it empty to begin anew"
    return ServiceError(Reason.INVALID_PAGE_TOKEN, text, field=field)
