"""What is asked of an environment without an episode, of any of its workers."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

import structlog

from opentinker_env_host.domain.player import MAX_CRASHES
from opentinker_env_host.domain.pool import WorkerPool
from opentinker_env_host.ports import (
    NoWorkerFree,
    OptionsRefused,
    Reply,
    WorkerError,
    WorkerLost,
    WorkerTimedOut,
)
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

TIMEOUT_S = 30.0
_REMEMBERED = 10_000


class Questions:
    """See the module's text. Raises ServiceError."""

    def __init__(self) -> None:
        self._checked: set[tuple[str, str]] = set()

    async def check_options(self, pool: WorkerPool, options: Mapping[str, Any]) -> None:
        """INVALID_FIELD if the environment does not take these options."""
        key = (pool.name, json.dumps(options, sort_keys=True))
        if key not in self._checked:
            await self.ask(pool, "check", options=options)
            if len(self._checked) > _REMEMBERED:
                self._checked.clear()
            self._checked.add(key)

    async def ask(self, pool: WorkerPool, operation: str, **fields: Any) -> Reply:
        """The answer of a worker of the pool."""
        ticket = f"{operation}-{secrets.token_hex(4)}"
        for attempt in range(MAX_CRASHES):
            try:
                worker = await pool.acquire(ticket)
                try:
                    return await worker.call(operation, TIMEOUT_S, **fields)
                finally:
                    await pool.release(ticket, worker)
            except OptionsRefused as error:
                raise ServiceError(Reason.INVALID_FIELD, str(error), field="options_json") from None
            except WorkerLost as error:
                log.warning("worker lost", environment=pool.name, operation=operation, attempt=attempt)
                last: WorkerError = error
            except WorkerTimedOut as error:
                raise ServiceError(Reason.STEP_TIMEOUT, str(error)) from None
            except NoWorkerFree as error:
                raise ServiceError(Reason.OVERLOADED, str(error), retry_after_s=1.0) from None
            except WorkerError as error:
                raise ServiceError(Reason.ENV_CRASHED, str(error)) from None
        raise ServiceError(Reason.ENV_CRASHED, str(last))
