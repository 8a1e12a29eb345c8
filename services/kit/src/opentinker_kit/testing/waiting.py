"""Waiting for what other processes do, with a bound."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def wait_until(
    condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0, *, what: str = ""
) -> None:
    """Return once `condition` holds; AssertionError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = condition()
        if await held if inspect.isawaitable(held) else held:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:.0f} s still not: {what or condition}")
        await asyncio.sleep(0.02)


def wait_until_sync(condition: Callable[[], bool], timeout_s: float = 10.0, *, what: str = "") -> None:
    """`wait_until` for code without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout_s:.0f} s still not: {what or condition}")
        time.sleep(0.02)
