"""TLS and mutual TLS by settings."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from opentinker_kit.settings import TlsSettings
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime import errors
from opentinkerapi.runtime.channels import TlsFiles

from .conftest import Start
from .test_interceptors import UPLOAD, failure


@dataclass(frozen=True)
class Pem:
    """A certificate for 127.0.0.1 that signed itself, and its key."""

    certificate: bytes
    key: bytes


def make_pem() -> Pem:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "opentinker test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return Pem(
        certificate.public_bytes(pem),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain),
    )


@pytest.fixture
def server_pem() -> Pem:
    return make_pem()


def tls_settings(folder: Path, pem: Pem, client_ca: bytes | None = None) -> TlsSettings:
    (folder / "server.crt").write_bytes(pem.certificate)
    (folder / "server.key").write_bytes(pem.key)
    if client_ca is not None:
        (folder / "clients.crt").write_bytes(client_ca)
    return TlsSettings(
        certificate_file=folder / "server.crt",
        key_file=folder / "server.key",
        client_ca_file=folder / "clients.crt" if client_ca is not None else None,
    )


async def test_calls_over_tls(start: Start, tmp_path: Path, server_pem: Pem) -> None:
    running = await start(tls=tls_settings(tmp_path, server_pem))
    async with running.channel(tls=TlsFiles(root=server_pem.certificate)) as channel:
        assert (await BlobServiceStub(channel).CreateUpload(UPLOAD)).url == "put-here"
    for unsafe in (None, TlsFiles(root=make_pem().certificate)):
        async with running.channel(tls=unsafe) as channel:
            error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD, timeout=10))
        assert isinstance(error, errors.Unavailable)


async def test_mutual_tls_asks_for_a_known_client(start: Start, tmp_path: Path, server_pem: Pem) -> None:
    client_pem = make_pem()
    running = await start(tls=tls_settings(tmp_path, server_pem, client_pem.certificate))
    known = TlsFiles(root=server_pem.certificate, key=client_pem.key, chain=client_pem.certificate)
    async with running.channel(tls=known) as channel:
        assert (await BlobServiceStub(channel).CreateUpload(UPLOAD)).url == "put-here"
    async with running.channel(tls=TlsFiles(root=server_pem.certificate)) as channel:
        error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD, timeout=10))
    assert isinstance(error, errors.Unavailable)
