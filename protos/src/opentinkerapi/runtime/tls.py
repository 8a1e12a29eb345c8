"""TLS as the client and the servers share it: what an address says, one end's files, why a handshake fails.

An address is `host:port`, `grpcs://host:port` (TLS) or `grpc://host:port` (plain); `https://` and `http://`
mean the same. Without a scheme it is TLS exactly where the caller has TLS files. gRPC reports every failed
handshake as UNAVAILABLE, as it does a server that is away, so `why_not` looks for itself.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opentinkerapi.runtime.errors import InvalidArgument, OpenTinkerError, TlsFailed, Unavailable
from opentinkerapi.runtime.reasons import Reason

if TYPE_CHECKING:
    import socket
    import ssl

TLS_SCHEME, PLAIN_SCHEME = "grpcs://", "grpc://"
_SCHEMES = {TLS_SCHEME: True, "https://": True, PLAIN_SCHEME: False, "http://": False}

PROBE_S = 3.0
"""How long `why_not` waits for a connection and for a handshake."""
_ALERT_S = 1.0
"""How long it waits for a server to say that it does not like the client's certificate."""

_TRIES, _PAUSE_S = 3, 0.2
"""How often it looks whether a server closes the connection in its face, and how long it waits in between."""

_OPTIONS = "a client: tls_ca, tls_cert, tls_key or OPENTINKER_TLS_CA, _CERT, _KEY; a server: peer_tls"


class _Closed(Exception):
    """The server closed the connection right after the handshake."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM contents. `key` and `chain` only for mutual TLS; without `root` the system's authorities are
    used.
    """

    root: bytes | None = None
    key: bytes | None = None
    chain: bytes | None = None
    server_name: str = ""
    """The name that servers' certificates are checked for, instead of the host of the address."""

    def __repr__(self) -> str:
        return f"TlsFiles(mutual={self.chain is not None}, server_name={self.server_name!r})"


def split_address(address: str) -> tuple[bool | None, str]:
    """Whether an address asks for TLS (None: it does not say), and the address without its scheme."""
    for scheme, secure in _SCHEMES.items():
        if address.startswith(scheme):
            return secure, address.removeprefix(scheme).rstrip("/")
    return None, address


def is_secure(address: str, tls: TlsFiles | None) -> bool:
    """Whether the server at an address is spoken to by TLS."""
    secure, _ = split_address(address)
    return tls is not None if secure is None else secure


def read_files(
    ca: str | Path | None,
    certificate: str | Path | None,
    key: str | Path | None,
    server_name: str = "",
    *,
    fields: Sequence[str] = ("tls_ca", "tls_cert", "tls_key"),
) -> TlsFiles:
    """Read and check PEM files. InvalidArgument, with the field's name of `fields`, if one is of no use."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    root = _read(ca, fields[0])
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError:
            raise _invalid(fields[0], f"{ca} holds no certificate in PEM form") from None
    if (certificate is None) != (key is None):
        raise _invalid(fields[1 if certificate is None else 2], "a certificate and its key go together")
    chain, secret = _read(certificate, fields[1]), _read(key, fields[2])
    if certificate is not None and key is not None:
        try:
            # Without a password openssl would ask at the terminal for that of an encrypted key.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise _invalid(fields[2], f"{key} is not the key of {certificate}: {error.reason}") from None
    return TlsFiles(root, secret, chain, server_name)


def why_not(address: str, tls: TlsFiles | None, timeout_s: float = PROBE_S) -> str:
    """Why no TLS connection to a server comes about, and what to do; empty if TLS is not the reason.

    Makes a connection of its own and blocks, at most for a few seconds.
    """
    import socket

    _, where = split_address(address)
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit():
        return ""
    for _ in range(_TRIES):
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as raw:
                if is_secure(address, tls):
                    return _why_no_tls(raw, where, host.strip("[]"), tls or TlsFiles())
                return _why_not_plain(raw, where)
        except _Closed:
            # A server that is being stopped does that once, and then nobody listens.
            time.sleep(_PAUSE_S)
        except OSError:
            return ""
    return _refuses(where, tls, "it closes the connection")


async def explained(error: OpenTinkerError, address: str, tls: TlsFiles | None) -> OpenTinkerError:
    """TlsFailed where that is why a call did not get through, otherwise the error as it is."""
    if not isinstance(error, Unavailable) or error.reason != Reason.CONNECTION_LOST:
        return error
    why = await asyncio.to_thread(why_not, address, tls)
    return TlsFailed(why, reason=Reason.TLS_FAILED) if why else error


def _why_not_plain(raw: "socket.socket", where: str) -> str:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(raw).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return ""
    return (
        f"the server at {where} speaks TLS and was called without: "
        f"use the address {TLS_SCHEME}{where}, and name the authority of its certificate ({_OPTIONS})"
    )


def _why_no_tls(raw: "socket.socket", where: str, host: str, tls: TlsFiles) -> str:
    import ssl

    try:
        with _context(tls).wrap_socket(raw, server_hostname=tls.server_name or host) as wrapped:
            # In TLS 1.3 a client has shaken hands before the server has seen its certificate.
            wrapped.settimeout(_ALERT_S)
            if not _speaks(wrapped):
                raise _Closed
            return ""
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the server at {where} is refused: {error.verify_message}; give the "
            "certificate of the authority that signed it, and call the server by a name that is in it "
            f"({_OPTIONS})"
        )
    except ssl.SSLEOFError:
        # As when the server was killed just then.
        return ""
    except ssl.SSLError as error:
        reason = (error.reason or "").lower().replace("_", " ")
        if "alert" in reason:
            return _refuses(where, tls, reason)
        return (
            f"the server at {where} does not speak TLS and was called with it ({reason}): "
            f"use the address {PLAIN_SCHEME}{where}, or give that server a certificate (tls)"
        )


def _speaks(wrapped: "ssl.SSLSocket") -> bool:
    """Whether a gRPC server says something at once, as it does to those whom it lets in."""
    try:
        return bool(wrapped.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def _refuses(where: str, tls: TlsFiles | None, how: str) -> str:
    if tls is None or tls.chain is None:
        return (
            f"the server at {where} takes only callers with a certificate, and this end has none ({how}): "
            f"give a certificate and its key that the server's client_ca_file has signed ({_OPTIONS})"
        )
    return (
        f"the server at {where} refused this end's certificate ({how}): "
        f"use one that the server's client_ca_file has signed ({_OPTIONS})"
    )


def _context(tls: TlsFiles) -> "ssl.SSLContext":
    import ssl

    context = ssl.create_default_context(cadata=tls.root.decode() if tls.root else None)
    context.set_alpn_protocols(["h2"])
    if tls.chain and tls.key:
        with _written(tls.chain, tls.key) as (certificate, key):
            context.load_cert_chain(certificate, key)
    return context


@contextlib.contextmanager
def _written(*contents: bytes) -> Iterator[list[Path]]:
    """Files with these contents, which nobody else may read: `ssl` takes certificates from files alone."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        yield paths


def _read(path: str | Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _invalid(field, f"{path} cannot be read: {error.strerror}") from None


def _invalid(field: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {text}", reason=Reason.INVALID_FIELD, field=field)
