"""How far sampling may run ahead of training, and in which order what it brings is used.

Both are plain bookkeeping without clocks or tasks: an asynchronous loop asks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentinker.errors import invalid

T = TypeVar("T")


def capacity(
    *, max_concurrent: int, max_staleness: int, batch: int, version: int, accepted: int, running: int
) -> int:
    """How many samples may be started now (AReaL, arXiv 2505.24298); negative if there are too many.

    min(max_concurrent - running, (max_staleness + version + 1) batch - (accepted + running)): `batch` samples
    a version are consumed, so what is started beyond that would be older than `max_staleness` versions when
    its turn comes. `accepted` counts from the run's beginning; after a resume it is what it was, not 0.
    """
    return min(max_concurrent - running, (max_staleness + version + 1) * batch - (accepted + running))


class StalenessGate:
    """Counts what runs and what was accepted, and says how much more may be started.

    A sample that is not used (its group taught nothing, it failed, it got too old) is given back and takes up
    no room. `state()` goes into a checkpoint; the samples that ran then are gone after a resume.
    """

    def __init__(
        self, *, max_concurrent: int, max_staleness: int, batch: int, version: int = 0, accepted: int = 0
    ) -> None:
        for name, value, least in (
            ("max_concurrent", max_concurrent, 1),
            ("max_staleness", max_staleness, 0),
            ("batch", batch, 1),
            ("version", version, 0),
            ("accepted", accepted, 0),
        ):
            if value < least:
                raise invalid(name, f"must be at least {least}, not {value}")
        self._max_concurrent = max_concurrent
        self._max_staleness = max_staleness
        self._batch = batch
        self._version = version
        self._accepted = accepted
        self._running = 0

    @property
    def version(self) -> int:
        """The newest version."""
        return self._version

    @property
    def running(self) -> int:
        """Started and not ended."""
        return self._running

    @property
    def accepted(self) -> int:
        """Ended and used, or waiting to be, since the run began."""
        return self._accepted

    @property
    def capacity(self) -> int:
        """How many may be started now, at least 0."""
        free = capacity(
            max_concurrent=self._max_concurrent,
            max_staleness=self._max_staleness,
            batch=self._batch,
            version=self._version,
            accepted=self._accepted,
            running=self._running,
        )
        return max(free, 0)

    def start(self, count: int = 1) -> None:
        """InvalidArgument if there is no room for `count` more."""
        if not 0 < count <= self.capacity:
            raise invalid("count", f"must be in [1, {self.capacity}], not {count}")
        self._running += count

    def end(self, *, accepted: int = 0, rejected: int = 0) -> None:
        """Some that ran have ended: to be used, or not."""
        if accepted < 0 or rejected < 0 or accepted + rejected > self._running:
            raise invalid("accepted", f"{accepted} + {rejected} of {self._running} cannot have ended")
        self._running -= accepted + rejected
        self._accepted += accepted

    def give_back(self, count: int) -> None:
        """Some that were accepted will not be used after all."""
        if not 0 <= count <= self._accepted:
            raise invalid("count", f"must be in [0, {self._accepted}], not {count}")
        self._accepted -= count

    def advance(self, version: int) -> None:
        """A newer version was published."""
        if version < self._version:
            raise invalid("version", f"must not fall from {self._version} to {version}")
        self._version = version

    def state(self) -> dict[str, int]:
        """What `StalenessGate(**settings, **state)` needs to go on after a resume."""
        return {"version": self._version, "accepted": self._accepted}


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    version: int
    ordinal: int
    item: T


class StalenessBuffer(Generic[T]):
    """What waits to be trained on: oldest first, nothing lost silently.

    put = taken + dropped + waiting, always. The age of a sample is that of its oldest token.
    """

    def __init__(self, max_staleness: int) -> None:
        if max_staleness < 0:
            raise invalid("max_staleness", f"must be at least 0, not {max_staleness}")
        self._max_staleness = max_staleness
        self._waiting: list[_Waiting[T]] = []
        self._counts = {"put": 0, "taken": 0, "dropped": 0}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def counts(self) -> Mapping[str, int]:
        """`put`, `taken` and `dropped` since the beginning, and `waiting`."""
        return {**self._counts, "waiting": len(self._waiting)}

    def put(self, item: T, *, version: int, ordinal: int) -> None:
        """Add a sample whose oldest token is of `version`; `ordinal` is its place in the order of tasks."""
        self._counts["put"] += 1
        self._waiting.append(_Waiting(version, ordinal, item))

    def drop_stale(self, version: int) -> list[T]:
        """Remove and return what is more than `max_staleness` versions older than `version`."""
        stale = [each for each in self._waiting if version - each.version > self._max_staleness]
        self._waiting = [each for each in self._waiting if version - each.version <= self._max_staleness]
        self._counts["dropped"] += len(stale)
        return [each.item for each in stale]

    def take(self, count: int, version: int) -> list[T] | None:
        """The oldest `count` that are fresh enough to train `version` on, or None while there are fewer.

        By version, then ordinal. Call `drop_stale` first: what is too old is never taken, but only that
        removes it.
        """
        fresh = sorted(
            (each for each in self._waiting if version - each.version <= self._max_staleness),
            key=lambda each: (each.version, each.ordinal),
        )[:count]
        if len(fresh) < count:
            return None
        chosen = {id(each) for each in fresh}
        self._waiting = [each for each in self._waiting if id(each) not in chosen]
        self._counts["taken"] += count
        return [each.item for each in fresh]
