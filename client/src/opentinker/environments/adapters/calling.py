"""Calling functions of users from `async` code: plain ones in threads, so that they may block."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from opentinker.environments.daemon_threads import DaemonThreads

_THREADS = DaemonThreads()


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function, plain or `async`."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await asyncio.wrap_future(_THREADS.submit(lambda: function(*args, **kwargs)))
    return await value if isinstance(value, Awaitable) else value
