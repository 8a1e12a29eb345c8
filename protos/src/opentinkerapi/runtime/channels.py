"""The one function that builds channels: limits, keepalive, retries as data, credentials.

A channel adds the caller's credentials to each call as metadata: `authorization: Bearer <key>` and, for calls
made under a job, `x-opentinker-job-token: <token>`. Retries are gRPC service config (see `retries`), never
code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from opentinkerapi.runtime import tracing
from opentinkerapi.runtime.addresses import authority, balanced_config, is_several, target
from opentinkerapi.runtime.retries import service_config
from opentinkerapi.runtime.tls import TlsFiles, is_secure, split_address

AUTHORIZATION = "authorization"
JOB_TOKEN = "x-opentinker-job-token"

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""What one message may hold, in both directions; larger bodies are chunked or named by a BlobRef."""

KEEPALIVE_MS = 20_000
"""How often an idle connection with calls on it is probed; servers allow twice as often."""


def open_channel(
    address: str,
    *,
    key: str | None = None,
    job_token: str | Callable[[], str] | None = None,
    tls: TlsFiles | None = None,
) -> grpc.aio.Channel:
    """Open a channel to `address`: `host:port`, with a scheme (see `tls`), or several (see `addresses`).
    Connects on first use; close it when done. OSError where of several names none is known.

    `key` is an API key, `job_token` what RenewJobLease returned for the job that the calls belong to, or a
    function that gives it anew for each call: tokens last as long as leases do.
    """
    _, where = split_address(address)
    options: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted server is found again within a second, not after the default two minutes of back-off.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", balanced_config() if is_several(where) else service_config()),
        # Two channels to one address must not share a connection: closing one would then be felt by the
        # other.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if is_several(where):
        options.append(("grpc.default_authority", authority(where)))
    interceptors, where = _credentials(key, job_token), target(where)
    if not is_secure(address, tls):
        return grpc.aio.insecure_channel(where, options=options, interceptors=interceptors)
    files = tls or TlsFiles()
    options += tls_options(files)
    return grpc.aio.secure_channel(where, tls_credentials(files), options=options, interceptors=interceptors)


def tls_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """What a channel shows and trusts."""
    return grpc.ssl_channel_credentials(files.root, files.key, files.chain)


def tls_options(files: TlsFiles) -> list[tuple[str, int | str]]:
    """What a channel is told beside that."""
    return [("grpc.ssl_target_name_override", files.server_name)] if files.server_name else []


def auth_metadata(key: str | None, job_token: str | None = None) -> tuple[tuple[str, str], ...]:
    """The metadata that carries the given credentials."""
    pairs: list[tuple[str, str]] = []
    if key:
        pairs.append((AUTHORIZATION, f"Bearer {key}"))
    if job_token:
        pairs.append((JOB_TOKEN, job_token))
    return tuple(pairs)


def _credentials(
    key: str | None, job_token: str | Callable[[], str] | None
) -> Sequence[grpc.aio.ClientInterceptor]:
    if not key and not job_token and not tracing.is_on():
        return []

    def pairs() -> tuple[tuple[str, str], ...]:
        return auth_metadata(key, job_token() if callable(job_token) else job_token)

    return [_UnaryUnary(pairs), _UnaryStream(pairs), _StreamUnary(pairs), _StreamStream(pairs)]


class _AddsMetadata:
    """Adds credentials and the trace to every call; grpc.aio wants one class for each kind of call."""

    def __init__(self, pairs: Callable[[], tuple[tuple[str, str], ...]]) -> None:
        self._pairs = pairs

    def _begin(
        self, details: grpc.aio.ClientCallDetails
    ) -> tuple[grpc.aio.ClientCallDetails, Callable[[Any], Any]]:
        """The call as it is to be made, and what the call object goes through."""
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        method = details.method
        trace, watch = tracing.calling(method.decode() if isinstance(method, bytes) else method)
        for name, value in (*self._pairs(), *trace):
            metadata.add(name, value)
        made = grpc.aio.ClientCallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=metadata,
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
        )
        return made, watch


class _UnaryUnary(_AddsMetadata, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, watch = self._begin(client_call_details)
        return watch(await continuation(details, request))


class _UnaryStream(_AddsMetadata, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, watch = self._begin(client_call_details)
        return watch(await continuation(details, request))


class _StreamUnary(_AddsMetadata, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        details, watch = self._begin(client_call_details)
        return watch(await continuation(details, request_iterator))


class _StreamStream(_AddsMetadata, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        details, watch = self._begin(client_call_details)
        return watch(await continuation(details, request_iterator))
