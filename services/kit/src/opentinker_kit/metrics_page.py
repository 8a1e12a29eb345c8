"""The page that Prometheus reads: `GET /metrics`, on a port of its own.

It is made on the event loop that the server runs on, so that what it shows needs no locks. That loop answers
nothing else meanwhile; a page takes a few milliseconds.
"""

import asyncio
import contextlib
import hmac
import ssl
from collections.abc import Callable, Mapping
from http import HTTPStatus

import structlog

from opentinker_kit.settings import ServerSettings, TlsSettings

log = structlog.get_logger()

PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_HEAD_BYTES = 16 * 1024
_PATIENCE_S = 5.0
"""A caller who has not said by then what it wants is left."""


class MetricsPage:
    """Serves what `page` makes, by TLS and to known callers where the settings say so."""

    def __init__(self, settings: ServerSettings, page: Callable[[], bytes]) -> None:
        self._settings = settings
        self._page = page
        self._key = settings.metrics_key()
        self._server: asyncio.Server | None = None
        self.port = 0
        """The bound port, once started."""

    async def start(self) -> int:
        """Listen; returns the bound port. OSError if it is taken."""
        settings = self._settings
        self._server = await asyncio.start_server(
            self._answer,
            settings.metrics_host,
            settings.metrics_port,
            limit=_MAX_HEAD_BYTES,
            ssl=_tls(settings.tls) if settings.tls is not None else None,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("metrics", host=settings.metrics_host, port=self.port)
        return self.port

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status, body = self._respond(head)
                writer.write(_response(status, body))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _respond(self, head: str) -> tuple[HTTPStatus, bytes]:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path != PATH:
            return HTTPStatus.NOT_FOUND, b"the metrics are at /metrics\n"
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n"
        if self._key is not None and not _knows(self._key, _headers(lines)):
            return HTTPStatus.UNAUTHORIZED, b"the bearer token of metrics_key_file is needed\n"
        try:
            return HTTPStatus.OK, self._page()
        except Exception:
            log.exception("the metrics could not be made")
            return HTTPStatus.INTERNAL_SERVER_ERROR, b"a fault in the server; its log has the details\n"


def _headers(lines: list[str]) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _knows(key: str, headers: Mapping[str, str]) -> bool:
    given = headers.get("authorization", "")
    return hmac.compare_digest(given.encode("latin-1"), f"Bearer {key}".encode())


def _response(status: HTTPStatus, body: bytes) -> bytes:
    kind = _TYPE if status is HTTPStatus.OK else "text/plain"
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _tls(settings: TlsSettings) -> ssl.SSLContext:
    """As the server itself: with a `client_ca_file` whoever reads the page needs a certificate, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.certificate_file, settings.key_file)
    if settings.client_ca_file is not None:
        context.load_verify_locations(settings.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
