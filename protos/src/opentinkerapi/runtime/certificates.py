"""Certificates for development: an authority of one's own, what it signed for servers and for clients.

(Needs the extra `certificates`.) Who has `ca.key` can pretend to be any server of the cluster.
"""

import datetime
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opentinkerapi.runtime.errors import AlreadyExists, InvalidArgument, MissingDependency
from opentinkerapi.runtime.reasons import Reason

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names that every server's certificate is for."""
DAYS = 365
NAMES = ("ca", "server", "client")
"""Each is a NAME.pem and a NAME.key. `server` may also be shown by a server that calls another one."""

_BACKDATED = datetime.timedelta(minutes=5)
"""Clocks of machines differ."""


def make_certificates(folder: Path, hosts: Sequence[str] = (), days: int = DAYS) -> list[Path]:
    """Make all files in a folder; returns their paths. `hosts` are names and addresses of servers.

    AlreadyExists if one of them is there: nothing is written then. MissingDependency without the extra.
    """
    if days < 1:
        raise InvalidArgument(f"days: {days} is less than 1", reason=Reason.INVALID_FIELD, field="days")
    contents = _contents([*LOOPBACK, *hosts], days)
    there = [str(folder / name) for name in contents if (folder / name).exists()]
    if there:
        raise AlreadyExists(
            f"{', '.join(there)} would be overwritten, and what is in use be refused; name another directory",
            reason=Reason.ALREADY_REGISTERED,
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        mode = 0o600 if name.endswith(".key") else 0o644
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
    return [folder / name for name in contents]


def _contents(hosts: Sequence[str], days: int) -> Mapping[str, bytes]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingDependency(
            'certificates are made with cryptography; run: pip install "opentinker[certificates]"',
            reason=Reason.MISSING_DEPENDENCY,
        ) from None
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in NAMES}
    signed = {name: _certificate(name, keys[name], keys["ca"], hosts, days) for name in NAMES}
    pem = serialization.Encoding.PEM
    contents: dict[str, bytes] = {}
    for name in NAMES:
        contents[f"{name}.pem"] = signed[name].public_bytes(pem)
        contents[f"{name}.key"] = keys[name].private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    return contents


def _certificate(
    name: str,
    key: "ec.EllipticCurvePrivateKey",
    authority: "ec.EllipticCurvePrivateKey",
    hosts: Sequence[str],
    days: int,
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID as Use

    now = datetime.datetime.now(datetime.UTC)
    is_authority = name == "ca"
    builder = (
        x509.CertificateBuilder()
        .subject_name(_called(name))
        .issuer_name(_called("ca"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
        )
        .add_extension(_usage(is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
    )
    if name == "server":
        names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(names, critical=False)
    if not is_authority:
        uses = [Use.CLIENT_AUTH] if name == "client" else [Use.SERVER_AUTH, Use.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    return builder.sign(authority, hashes.SHA256())


def _called(name: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"opentinker development {name}")])


def _usage(is_authority: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or ":" in host or "/" in host:
            raise ValueError
        return x509.DNSName(host)
    except ValueError:
        text = f"hosts: {host!r} is neither a host name nor an address; ports and schemes do not belong here"
        raise InvalidArgument(text, reason=Reason.INVALID_FIELD, field="hosts") from None
