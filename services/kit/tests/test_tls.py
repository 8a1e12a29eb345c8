"""TLS and mutual TLS by settings, with real certificates over real sockets; what is said where it fails."""

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opentinker_kit.accounts import RemoteAccounts
from opentinker_kit.auth import digest_of
from opentinker_kit.clock import SystemClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.healthcheck import files_of_this_server, is_serving
from opentinker_kit.settings import PeerTlsSettings, ServerSettings, TlsSettings
from opentinker_kit.testing import wait_until
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime import errors
from opentinkerapi.runtime.certificates import make_certificates
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.tls import TlsFiles, explained, is_secure, read_files, split_address

from .conftest import CALLER_KEY, Running, Start
from .test_interceptors import UPLOAD, failure
from .test_registration import Handler, Registry, _registration, server_registry_service_pb2_grpc


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another authority."""
    folder = tmp_path_factory.mktemp("others")
    make_certificates(folder)
    return folder


def served(folder: Path, *, mutual: bool = False) -> TlsSettings:
    return TlsSettings(
        certificate_file=folder / "server.pem",
        key_file=folder / "server.key",
        client_ca_file=folder / "ca.pem" if mutual else None,
    )


def trusting(folder: Path, name: str = "") -> TlsFiles:
    return read_files(folder / "ca.pem", None, None, name)


def shown_by(folder: Path, authority: Path) -> TlsFiles:
    return read_files(authority / "ca.pem", folder / "client.pem", folder / "client.key")


async def failed(address: str, tls: TlsFiles | None) -> errors.OpenTinkerError:
    """How a call fails, as a client sees it."""
    async with open_channel(address, key=CALLER_KEY, tls=tls) as channel:
        error = await failure(BlobServiceStub(channel).CreateUpload(UPLOAD, timeout=20))
    assert isinstance(error, errors.Unavailable)
    return await explained(error, address, tls)


async def works(address: str, tls: TlsFiles | None) -> bool:
    async with open_channel(address, key=CALLER_KEY, tls=tls) as channel:
        answer = await BlobServiceStub(channel).CreateUpload(UPLOAD, timeout=20)
    return bool(answer.url == "put-here")


def plain(running: Running) -> str:
    return f"127.0.0.1:{running.server.port}"


async def test_calls_over_tls(start: Start, certs: Path) -> None:
    running = await start(tls=served(certs))
    assert running.server.address == f"grpcs://127.0.0.1:{running.server.port}"
    for address in (running.server.address, plain(running), f"https://localhost:{running.server.port}"):
        assert await works(address, trusting(certs))


async def test_a_wrong_authority_is_named(start: Start, certs: Path, others: Path) -> None:
    running = await start(tls=served(certs))
    # Without one of its own a client trusts the system's.
    for tls in (trusting(others), TlsFiles()):
        error = await failed(running.server.address, tls)
        assert isinstance(error, errors.TlsFailed)
        assert error.reason == errors.Reason.TLS_FAILED
        assert all(word in error.message for word in (plain(running), "refused", "tls_ca", "peer_tls"))


async def test_a_certificate_is_for_certain_names(start: Start, certs: Path) -> None:
    running = await start(tls=served(certs))
    error = await failed(running.server.address, trusting(certs, "scheduler.example"))
    assert isinstance(error, errors.TlsFailed)
    assert "scheduler.example" in error.message
    assert await works(running.server.address, trusting(certs, "localhost"))


async def test_one_end_without_tls(start: Start, certs: Path) -> None:
    secure = await start(tls=served(certs))
    error = await failed(plain(secure), None)
    assert isinstance(error, errors.TlsFailed)
    assert f"grpcs://{plain(secure)}" in error.message
    bare = await start()
    for address, tls in ((f"grpcs://{plain(bare)}", None), (plain(bare), trusting(certs))):
        error = await failed(address, tls)
        assert isinstance(error, errors.TlsFailed)
        assert f"grpc://{plain(bare)}" in error.message
    assert await works(f"grpc://{plain(bare)}", trusting(certs))


async def test_mutual_tls_asks_for_a_known_client(start: Start, certs: Path, others: Path) -> None:
    running = await start(tls=served(certs, mutual=True))
    address = running.server.address
    assert await works(address, shown_by(certs, certs))
    nobody = await failed(address, trusting(certs))
    assert isinstance(nobody, errors.TlsFailed)
    assert "only callers with a certificate" in nobody.message
    stranger = await failed(address, shown_by(others, certs))
    assert isinstance(stranger, errors.TlsFailed)
    assert "refused this end's certificate" in stranger.message
    without = await failed(plain(running), None)
    assert isinstance(without, errors.TlsFailed)


async def test_what_has_nothing_to_do_with_tls_stays_as_it_is(start: Start, certs: Path) -> None:
    running = await start(tls=served(certs))
    address = running.server.address
    await running.server.drain()
    error = await failed(address, trusting(certs))
    assert not isinstance(error, errors.TlsFailed)
    other = errors.NotFound("no such job", reason=errors.Reason.JOB_NOT_FOUND)
    assert await explained(other, address, None) is other


async def test_a_server_registers_over_mutual_tls(certs: Path, tmp_path: Path, start: Start) -> None:
    registry, lost = Registry(), list[bool]()
    running = await start_registry(registry, served(certs, mutual=True))
    try:
        # No certificate of its own for calls: it shows the one that it serves with.
        peers = {"tls": served(certs), "peer_tls": PeerTlsSettings(ca_file=certs / "ca.pem")}
        registration = _registration(running.address, Handler(), lost, tmp_path)
        registration._settings = ServerSettings(
            scheduler_address=running.address, state_dir=tmp_path, **peers
        )
        registration.start()
        await wait_until(registration.holds_lease, timeout_s=10)
        await registration.stop()
        assert registry.deregistered
    finally:
        await running.drain()


async def test_a_server_that_cannot_register_says_why(
    certs: Path, others: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await start_registry(Registry(), served(certs))
    try:
        registration = _registration(running.address, Handler(), [], tmp_path)
        registration._settings = ServerSettings(
            scheduler_address=running.address, peer_tls=PeerTlsSettings(ca_file=others / "ca.pem")
        )
        registration.start()
        said: list[str] = []

        def told() -> bool:
            said.append("".join(capsys.readouterr()))
            return "TLS_FAILED" in "".join(said)

        await wait_until(told, timeout_s=20)
        assert "peer_tls" in "".join(said)
        await registration.stop()
    finally:
        await running.drain()


async def start_registry(registry: Registry, tls: TlsSettings) -> Any:
    from opentinker_kit.auth import AuthPolicy
    from opentinker_kit.server import build_server

    name = "opentinkerapi.scheduler.v1.ServerRegistryService"
    calls = ("RegisterServer", "ServerSession", "DeregisterServer")
    methods = {f"/{name}/{each}": "service" for each in calls}
    add = server_registry_service_pb2_grpc.add_ServerRegistryServiceServicer_to_server
    server = build_server(
        ServerSettings(tls=tls),
        lambda made: add(registry, made),
        service_names=[name],
        auth=AuthPolicy(None, None, methods),
    )
    await server.start()
    return server


async def test_accounts_cannot_be_asked_by_a_wrong_certificate(
    start: Start, certs: Path, others: Path
) -> None:
    running = await start(tls=served(certs))
    accounts = RemoteAccounts(
        lambda: running.server.address, "service-key", SystemClock(), tls=trusting(others)
    )
    with pytest.raises(ServiceError, match="certificate of the server"):
        await accounts.find(digest_of("a key"))
    await accounts.close()


async def test_the_health_check_reads_the_servers_own_settings(
    start: Start, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(tls=served(certs, mutual=True))
    assert files_of_this_server() is None
    monkeypatch.setenv("OPENTINKER_TLS__CERTIFICATE_FILE", str(certs / "server.pem"))
    monkeypatch.setenv("OPENTINKER_TLS__KEY_FILE", str(certs / "server.key"))
    monkeypatch.setenv("OPENTINKER_PEER_TLS__CA_FILE", str(certs / "ca.pem"))
    files = files_of_this_server("localhost")
    assert files is not None
    assert files.server_name == "localhost"
    assert await asyncio.to_thread(is_serving, plain(running), files)
    assert not await asyncio.to_thread(is_serving, plain(running), None)


def garbage(folder: Path) -> Path:
    path = folder / "garbage.pem"
    path.write_text("no certificate")
    return path


@pytest.mark.parametrize(
    ("choose", "field"),
    [
        (lambda certs, folder: (folder / "none.pem", None, None), "tls_ca"),
        (lambda certs, folder: (garbage(folder), None, None), "tls_ca"),
        (lambda certs, folder: (None, certs / "client.pem", None), "tls_key"),
        (lambda certs, folder: (None, None, certs / "client.key"), "tls_cert"),
        (lambda certs, folder: (None, certs / "client.pem", certs / "server.key"), "tls_key"),
        (lambda certs, folder: (None, certs / "client.pem", garbage(folder)), "tls_key"),
    ],
)
def test_files_of_no_use_are_refused_by_name(
    certs: Path, tmp_path: Path, choose: Callable[[Path, Path], Any], field: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=field) as caught:
        read_files(*choose(certs, tmp_path))
    assert caught.value.field == field


async def test_a_server_does_not_start_with_the_key_of_another_certificate(start: Start, certs: Path) -> None:
    wrong = TlsSettings(certificate_file=certs / "server.pem", key_file=certs / "client.key")
    with pytest.raises(ValueError, match="is not the key of"):
        await start(tls=wrong)


def test_addresses() -> None:
    assert split_address("grpcs://host:1") == (True, "host:1")
    assert split_address("https://host:1/") == (True, "host:1")
    assert split_address("grpc://host:1") == (False, "host:1")
    assert split_address("dns:///host:1") == (None, "dns:///host:1")
    assert (is_secure("host:1", None), is_secure("host:1", TlsFiles())) == (False, True)
    assert (is_secure("grpcs://host:1", None), is_secure("grpc://host:1", TlsFiles())) == (True, False)


def test_secrets_are_not_shown(certs: Path) -> None:
    assert "PRIVATE" not in repr(read_files(None, certs / "client.pem", certs / "client.key"))


def test_certificates_are_made_once_and_keys_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    made = make_certificates(folder, ["scheduler", "10.1.2.3"])
    assert {path.name for path in made} == {
        f"{name}.{kind}" for name in ("ca", "server", "client") for kind in ("pem", "key")
    }
    for path in made:
        others_may = stat.S_IMODE(path.stat().st_mode) & 0o077
        assert (others_may == 0) == (path.suffix == ".key")
    before = {path: path.read_bytes() for path in made}
    with pytest.raises(errors.AlreadyExists, match=r"ca\.pem"):
        make_certificates(folder)
    (folder / "ca.pem").unlink()
    with pytest.raises(errors.AlreadyExists):
        make_certificates(folder)
    assert not (folder / "ca.pem").exists()
    assert all(path.read_bytes() == before[path] for path in made if path.name != "ca.pem")
    for wrong in ("host:7070", "https://host", ""):
        with pytest.raises(errors.InvalidArgument, match="hosts"):
            make_certificates(tmp_path / "other", [wrong])
    with pytest.raises(errors.InvalidArgument, match="days"):
        make_certificates(tmp_path / "other", days=0)
    assert not (tmp_path / "other").exists()
