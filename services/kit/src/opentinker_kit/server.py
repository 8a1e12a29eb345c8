"""The one function that builds servers: limits, keepalive, interceptors, health, reflection, drain.

A server starts NOT_SERVING; its owner says when its dependencies answer. Told to stop (SIGTERM, SIGINT,
`drain`, or its lifeline closing) it turns NOT_SERVING, lets running calls finish for a while, and ends.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.files import write_json
from opentinker_kit.interceptors import CallInterceptor, EndedCall, Observer
from opentinker_kit.lifeline import watch_lifeline
from opentinker_kit.metrics import Metrics, NoMetrics, PrometheusMetrics
from opentinker_kit.metrics_page import MetricsPage
from opentinker_kit.settings import LOOPBACK, ServerSettings
from opentinkerapi.runtime.channels import KEEPALIVE_MS, MAX_MESSAGE_BYTES
from opentinkerapi.runtime.tls import TLS_SCHEME

log = structlog.get_logger()

_HARD_LIMIT_BYTES = 4 * MAX_MESSAGE_BYTES
"""Up to here an oversized message is read, so that its refusal can say what to do instead."""
_LIFELINE_DRAIN_S = 3.0
"""What running calls get when the supervisor is gone: ports must be free again in 10 s."""

Register = Callable[[grpc.aio.Server], None]
OnDrain = Callable[[], Awaitable[None]]


def build_server(
    settings: ServerSettings,
    register: Register,
    *,
    service_names: Sequence[str],
    auth: AuthPolicy,
    on_drain: OnDrain | None = None,
    observer: Observer | None = None,
) -> "KitServer":
    """Build a server, not yet listening.

    `register` adds the servicers; `service_names` are their full names, for health and reflection. `on_drain`
    runs when the server stops accepting work and before running calls are waited for. `observer` is told of
    every call that ended. ValueError if it would listen on other than loopback without keys.
    """
    if settings.listen_host not in LOOPBACK and not auth.has_keys:
        raise ValueError(
            f"refusing to listen on {settings.listen_host} without keys: anyone who reaches this machine "
            "could use the server; set service_key_file and bootstrap_key_file, or listen on 127.0.0.1"
        )
    metrics = PrometheusMetrics(auth.methods) if settings.metrics_port is not None else None
    server = grpc.aio.server(
        interceptors=[CallInterceptor(auth, _both(observer, metrics))],
        options=[
            ("grpc.max_receive_message_length", _HARD_LIMIT_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", int(settings.reuse_port)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ],
    )
    register(server)
    return KitServer(settings, server, tuple(service_names), on_drain, metrics)


def _both(observer: Observer | None, metrics: PrometheusMetrics | None) -> Observer | None:
    if observer is None or metrics is None:
        return observer if metrics is None else metrics.call

    def tell(call: EndedCall) -> None:
        metrics.call(call)
        observer(call)

    return tell


class KitServer:
    """A gRPC server with its health, its signals and its end. Made by `build_server`."""

    def __init__(
        self,
        settings: ServerSettings,
        server: grpc.aio.Server,
        service_names: Sequence[str],
        on_drain: OnDrain | None,
        metrics: PrometheusMetrics | None = None,
    ) -> None:
        self.metrics: Metrics = metrics or NoMetrics()
        """Where the service says what there is to count."""
        self._metrics_page = MetricsPage(settings, metrics.page) if metrics is not None else None
        self._settings = settings
        self._server = server
        self._names = service_names
        self._on_drain = on_drain
        self._health = HealthServicer()
        add_HealthServicer_to_server(self._health, server)
        names = (*service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(ReflectionServicer(names), server)
        self._draining: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0
        """The bound port, once started."""

    @property
    def address(self) -> str:
        """`host:port` that others reach this server at, `grpcs://host:port` where it speaks TLS."""
        where = self._settings.advertise_address or f"{_bracketed(self._settings.listen_host)}:{self.port}"
        return where if self._settings.tls is None or "://" in where else f"{TLS_SCHEME}{where}"

    @property
    def metrics_port(self) -> int:
        """Where its metrics are read; 0 where there are none."""
        return self._metrics_page.port if self._metrics_page is not None else 0

    @property
    def draining(self) -> bool:
        """Whether the server was told to stop."""
        return self._draining is not None

    async def start(self, *, install_signals: bool = False) -> int:
        """Listen and answer health checks (NOT_SERVING); returns the bound port.

        OSError if the port is taken, ValueError if the TLS files are of no use. With `install_signals`
        SIGTERM and SIGINT drain the server.
        """
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        where = f"{_bracketed(self._settings.listen_host)}:{self._settings.listen_port}"
        try:
            self.port = self._bind(where)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {where}: {error}") from None
        if self.port == 0:
            raise OSError(f"cannot listen on {where}: the port is taken or not allowed")
        self._loop = asyncio.get_running_loop()
        if self._metrics_page is not None:
            await self._metrics_page.start()
        await self._server.start()
        if install_signals:
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(signum, self.request_drain)
        if self._settings.lifeline_fd is not None:
            watch_lifeline(self._settings.lifeline_fd, self._lifeline_closed)
        log.info("listening", address=self.address)
        return self.port

    async def set_serving(self, serving: bool, service: str = "") -> None:
        """Say whether a service (by default the server and all its services) answers calls.

        The first time that the server as a whole serves, `ready_file` is written.
        """
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *self._names) if service == "" else (service,):
            await self._health.set(name, status)
        if serving and service == "" and self._settings.ready_file is not None:
            report = {"port": self.port, "address": self.address, "pid": os.getpid()}
            if self._metrics_page is not None:
                report["metrics_port"] = self._metrics_page.port
            write_json(self._settings.ready_file, report)

    def request_drain(self) -> None:
        """Start to drain, from the event loop's thread; further requests change nothing."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._settings.drain_s))

    async def drain(self) -> None:
        """Stop: NOT_SERVING, no new calls, running calls get `drain_s` to finish, then they are cancelled."""
        self.request_drain()
        await self.wait()

    async def wait(self) -> None:
        """Return when the server has stopped."""
        await self._stopped.wait()

    def _bind(self, where: str) -> int:
        tls = self._settings.tls
        if tls is None:
            return self._server.add_insecure_port(where)
        key, certificate, client_ca = tls.read()
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )
        return self._server.add_secure_port(where, credentials)

    async def _drain(self, grace_s: float) -> None:
        log.info("draining", grace_s=grace_s)
        try:
            await self._health.enter_graceful_shutdown()
            if self._on_drain is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._on_drain()
        except Exception:
            log.exception("draining failed; stopping anyway")
        finally:
            await self._server.stop(grace_s)
            if self._metrics_page is not None:
                await self._metrics_page.stop()
            self._stopped.set()
            log.info("stopped")

    def _lifeline_closed(self) -> None:
        # From the lifeline's thread. The timer ends the process even if the event loop is stuck.
        timer = threading.Timer(_LIFELINE_DRAIN_S + 2.0, os._exit, args=(70,))
        timer.daemon = True
        timer.start()
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._drain_orphan)

    def _drain_orphan(self) -> None:
        log.warning("the supervisor is gone; stopping")
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(_LIFELINE_DRAIN_S))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
