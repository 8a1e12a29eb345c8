"""Waiting for what is only away: the object store or the scheduler, while it is started again."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

T = TypeVar("T")

AWAY = frozenset(
    {
        Reason.STORAGE_UNAVAILABLE,
        Reason.CONNECTION_LOST,
        Reason.DRAINING,
        Reason.SERVER_STARTING,
        Reason.DEADLINE_EXCEEDED,
    }
)
"""Reasons that pass by themselves."""
GIVE_UP_AFTER_S = 60.0
_RETRY_S = 0.5


async def patiently(
    clock: Clock, action: Callable[[], Awaitable[T]], give_up_after_s: float = GIVE_UP_AFTER_S
) -> T:
    """The result of an action that may be repeated, tried again while what it needs is away."""
    deadline = clock.monotonic() + give_up_after_s
    while True:
        try:
            return await action()
        except ServiceError as error:
            if error.reason not in AWAY or clock.monotonic() >= deadline:
                raise
            await clock.sleep(_RETRY_S)
