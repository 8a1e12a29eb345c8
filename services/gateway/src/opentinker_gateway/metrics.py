"""What the gateway counts: requests by route and status, how long they took, how many run."""

import time
from typing import Any

from opentinker_kit.metrics import OTHER, Metrics


class Counted:
    """An application whose requests are counted, to the end of their streams."""

    def __init__(self, app: Any, metrics: Metrics) -> None:
        self._app = app
        self._running = 0
        self._took = metrics.timer(
            "opentinker_gateway_request_seconds", "Requests that ended.", ("method", "route", "status")
        )
        metrics.read("opentinker_gateway_requests", "Requests that run.", lambda: {(): self._running})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = "aborted"

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        began = time.perf_counter()
        self._running += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            self._running -= 1
            # The route as it is written, never the path: callers make paths up.
            route = getattr(scope.get("route"), "path", OTHER)
            self._took(time.perf_counter() - began, scope["method"], route, status)
