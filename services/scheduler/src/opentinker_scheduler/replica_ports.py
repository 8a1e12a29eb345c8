"""What schedulers that share a database need of it, beside `ports`."""

from dataclasses import dataclass
from typing import Protocol

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.ports import Database
from opentinkerapi.runtime.reasons import Reason


class LeadershipLost(ServiceError):
    """Another scheduler leads this database now; this one must end. Callers are told to ask again."""

    def __init__(self, why: str) -> None:
        super().__init__(Reason.DRAINING, f"this scheduler was replaced: {why}", retry_after_s=0.5)


@dataclass(frozen=True, slots=True)
class Replica:
    """A scheduler among those that share a database."""

    name: str = ""
    """The same when it is started again, and nobody else's."""
    address: str = ""
    """Where it is reached, for those who ask another one."""


class SharedDatabase(Database, Protocol):
    """One whose leadership may be leased, so that another scheduler can take over."""

    @property
    def lease_s(self) -> float | None:
        """For how long; None where nobody else wants it."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this scheduler leads for all it knows: by its own clock its lease is not over."""
        ...

    async def renew(self) -> None:
        """Lead on for one more lease. LeadershipLost if another took over."""
        ...
