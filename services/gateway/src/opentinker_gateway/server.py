"""The HTTP server around the application: its socket, its signals, its end.

As `opentinker_kit.server` does for gRPC: told to stop, or when its lifeline closes, it takes no more
connections, lets running requests finish for a while, and ends.
"""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
from typing import Any

import structlog
import uvicorn

from opentinker_gateway.metrics import Counted
from opentinker_gateway.settings import GatewaySettings
from opentinker_kit.files import write_json
from opentinker_kit.lifeline import watch_lifeline
from opentinker_kit.metrics import PrometheusMetrics
from opentinker_kit.metrics_page import MetricsPage

log = structlog.get_logger()

BACKLOG = 1024
_LIFELINE_DRAIN_S = 3.0
"""What running requests get when the supervisor is gone: ports must be free again in 10 s."""


class HttpServer:
    """One HTTP server."""

    def __init__(self, settings: GatewaySettings, app: Any) -> None:
        """ValueError if it would listen on other than loopback without keys (the settings see to that), or
        without TLS files that can be read.
        """
        self._settings = settings
        metrics = PrometheusMetrics() if settings.metrics_port is not None else None
        self._metrics_page = MetricsPage(settings, metrics.page) if metrics is not None else None
        if metrics is not None:
            app = Counted(app, metrics)
        tls = settings.tls
        ca = tls.client_ca_file if tls is not None else None
        self._server = _Quiet(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(settings.drain_s)),
                ssl_certfile=tls.certificate_file if tls is not None else None,
                ssl_keyfile=tls.key_file if tls is not None else None,
                ssl_ca_certs=str(ca) if ca is not None else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if ca is not None else ssl.CERT_NONE,
            )
        )
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        """The bound port, once started."""

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen and serve; returns the bound port. OSError if the port is taken."""
        self._socket = self._listen()
        self.port = self._socket.getsockname()[1]
        loop = asyncio.get_running_loop()
        if install_signals:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(signum, self.request_drain)
        if self._settings.lifeline_fd is not None:
            watch_lifeline(self._settings.lifeline_fd, lambda: self._orphaned(loop))
        if self._metrics_page is not None:
            await self._metrics_page.start()
        self._serving = asyncio.create_task(self._server.serve([self._socket]), name="http")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise OSError("the HTTP server ended before it served")
            await asyncio.sleep(0.01)
        if self._settings.ready_file is not None:
            report = {"port": self.port, "address": self.address, "pid": os.getpid()}
            if self._metrics_page is not None:
                report["metrics_port"] = self._metrics_page.port
            write_json(self._settings.ready_file, report)
        log.info("listening", address=self.address)
        return self.port

    @property
    def address(self) -> str:
        """`host:port` that others reach this server at."""
        return self._settings.advertise_address or f"{self._settings.listen_host}:{self.port}"

    @property
    def metrics_port(self) -> int:
        """Where its metrics are read; 0 where there are none."""
        return self._metrics_page.port if self._metrics_page is not None else 0

    def request_drain(self) -> None:
        """Start to stop; further requests change nothing."""
        self._server.should_exit = True

    async def wait(self) -> None:
        """Return when the server has stopped."""
        assert self._serving is not None, "it was started"
        await self._serving
        if self._metrics_page is not None:
            await self._metrics_page.stop()
        log.info("stopped")

    def _listen(self) -> socket.socket:
        if self._settings.listen_fd is not None:
            return socket.socket(fileno=self._settings.listen_fd)
        family = socket.AF_INET6 if ":" in self._settings.listen_host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._settings.reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            made.bind((self._settings.listen_host, self._settings.listen_port))
            made.listen(BACKLOG)
        except OSError as error:
            made.close()
            where = f"{self._settings.listen_host}:{self._settings.listen_port}"
            raise OSError(f"cannot listen on {where}: {error.strerror}") from None
        return made

    def _orphaned(self, loop: asyncio.AbstractEventLoop) -> None:
        # From the lifeline's thread. The timer ends the process even if the event loop is stuck.
        timer = threading.Timer(_LIFELINE_DRAIN_S + 2.0, os._exit, args=(70,))
        timer.daemon = True
        timer.start()
        self._server.config.timeout_graceful_shutdown = round(_LIFELINE_DRAIN_S)
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self.request_drain)


class _Quiet(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield
