"""What a batch does about groups that take long."""

import math
from dataclasses import dataclass

from opentinker.errors import invalid


@dataclass(frozen=True, slots=True)
class WaitAll:
    """Each batch waits for all of its groups."""

    @property
    def deadline_s(self) -> float:
        """After which a group is late."""
        return math.inf

    @property
    def patience(self) -> int:
        """For how many batches a late group may be left behind."""
        return 0

    def enough(self, ended: int) -> bool:
        """Whether so many of a late group's episodes are a group."""
        return False


@dataclass(frozen=True, slots=True)
class MinViable:
    """A batch goes on without groups that are late; they play on, and are in the batch during which they end,
    the oldest first. So slow tasks keep their share of the data, a little older: `staleness` shows it.

    A group is late `deadline_s` after it began. With `k`, a late group of which k episodes have ended is
    closed: the others end as EPISODE_TIMEOUT, which never counts. Without, no group loses an episode to being
    slow. No group is left behind by more than `patience` batches; then it is waited for.
    """

    k: int | None = None
    deadline_s: float = 60.0
    patience: int = 4

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            raise invalid("stragglers.k", f"must be at least 1, not {self.k}")
        if not self.deadline_s > 0:
            raise invalid("stragglers.deadline_s", f"must be above 0, not {self.deadline_s}")
        if self.patience < 1:
            raise invalid("stragglers.patience", f"must be at least 1, not {self.patience}")

    def enough(self, ended: int) -> bool:
        """Whether so many of a late group's episodes are a group."""
        return self.k is not None and ended >= self.k


Stragglers = WaitAll | MinViable
