"""Pages of lists: sizes, and tokens that only the list they came from accepts."""

import base64
import hashlib
from dataclasses import dataclass

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

DEFAULT_SIZE = 100
MAX_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Page:
    """A stretch of a list."""

    scope: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    def next_token(self, total: int) -> str:
        """The token of the page after this one, empty if it is the last of `total` items."""
        return _token(self.scope, self.stop) if self.stop < total else ""


def page_of(size: int, token: str, *, scope: str) -> Page:
    """The page that a request asks for. ServiceError INVALID_PAGE_TOKEN, INVALID_FIELD."""
    if size < 0:
        raise ServiceError(Reason.INVALID_FIELD, f"must not be negative, is {size}", field="page_size")
    return Page(scope, _start(scope, token) if token else 0, min(size or DEFAULT_SIZE, MAX_SIZE))


def _token(scope: str, start: int) -> str:
    mark = hashlib.sha256(f"{scope}\0{start}".encode()).hexdigest()[:16]
    return base64.urlsafe_b64encode(f"{start}:{mark}".encode()).decode()


def _start(scope: str, token: str) -> int:
    try:
        start = int(base64.urlsafe_b64decode(token).decode().partition(":")[0])
    except ValueError:
        start = -1
    if start < 0 or _token(scope, start) != token:
        raise ServiceError(
            Reason.INVALID_PAGE_TOKEN, "the page token was not made by this list", field="page_token"
        )
    return start
