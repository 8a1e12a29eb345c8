"""Who asks."""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caller:
    """Calls behind the gateway are made with the caller's own key, so that it may do here what it may do
    anywhere, and no more.
    """

    key: str = field(repr=False)

    @property
    def digest(self) -> str:
        """Tells callers apart where the key itself must not be kept."""
        return hashlib.sha256(self.key.encode()).hexdigest()
