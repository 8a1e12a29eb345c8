"""The client library against a scheduler that speaks TLS, and one that does not."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opentinker as ot
from opentinker import errors
from opentinker.cli.app import app
from opentinker_kit.files import make_key_file
from opentinker_kit.settings import TlsSettings, read_secret
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.settings import SchedulerSettings

Start = Callable[..., Awaitable[tuple[str, str]]]


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes."""
    folder = tmp_path_factory.mktemp("made") / "certs"
    done = CliRunner().invoke(app, ["certs", str(folder), "--host", "scheduler.example"])
    assert done.exit_code == 0, done.output
    assert f"OPENTINKER_TLS_CA={folder / 'ca.pem'}" in done.output
    again = CliRunner().invoke(app, ["certs", str(folder)])
    assert isinstance(again.exception, errors.AlreadyExists)
    return folder


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts schedulers; address (without a scheme) and key."""
    for name in ("CA", "CERT", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"OPENTINKER_TLS_{name}", raising=False)
    started: list[Scheduler] = []

    async def run(**settings: Any) -> tuple[str, str]:
        names = ("bootstrap", "service")
        keys = {f"{name}_key_file": make_key_file(tmp_path / f"{name}.key") for name in names}
        folder = tmp_path / str(len(started))
        made = SchedulerSettings(**keys, state_dir=folder, launcher="static", drain_s=1.0, **settings)
        scheduler = Scheduler(made)
        started.append(scheduler)
        port = await scheduler.start()
        return f"127.0.0.1:{port}", read_secret(keys["bootstrap_key_file"])

    yield run
    for scheduler in started:
        await scheduler.server.drain()
        await scheduler.run()


def served(certs: Path, *, mutual: bool = False) -> TlsSettings:
    ca = certs / "ca.pem" if mutual else None
    return TlsSettings(
        certificate_file=certs / "server.pem", key_file=certs / "server.key", client_ca_file=ca
    )


async def connect(address: str, key: str, **options: Any) -> None:
    """Connect and list jobs, in another thread: the scheduler answers on this one's loop."""

    def run() -> None:
        with ot.connect(address, key=key, progress=False, **options) as cluster:
            assert cluster.jobs().result() == []

    await asyncio.to_thread(run)


async def test_a_client_connects_by_tls(start: Start, certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, key = await start(tls=served(certs))
    for named in (address, f"grpcs://{address}", f"https://{address}"):
        await connect(named, key, tls_ca=certs / "ca.pem")
    await connect(address, key, tls_ca=str(certs / "ca.pem"), tls_server_name="scheduler.example")
    monkeypatch.setenv("OPENTINKER_TLS_CA", str(certs / "ca.pem"))
    await connect(address, key)
    argv = ["status", "--address", f"grpcs://{address}", "--key", key]
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    assert done.exit_code == 0, done.output


async def test_mutual_tls(start: Start, certs: Path) -> None:
    address, key = await start(tls=served(certs, mutual=True))
    own = {"tls_cert": certs / "client.pem", "tls_key": certs / "client.key"}
    await connect(address, key, tls_ca=certs / "ca.pem", **own)
    with pytest.raises(errors.TlsFailed, match="only callers with a certificate"):
        await connect(address, key, tls_ca=certs / "ca.pem")


async def test_what_cannot_work_is_said_soon(start: Start, certs: Path, tmp_path: Path) -> None:
    done = await asyncio.to_thread(CliRunner().invoke, app, ["certs", str(tmp_path / "others")])
    assert done.exit_code == 0, done.output
    secure, key = await start(tls=served(certs))
    bare, _ = await start()
    began = time.monotonic()
    with pytest.raises(errors.TlsFailed, match=f"grpcs://{secure}"):
        await connect(secure, key)
    with pytest.raises(errors.TlsFailed, match="tls_ca"):
        await connect(secure, key, tls_ca=tmp_path / "others" / "ca.pem")
    with pytest.raises(errors.TlsFailed, match=f"grpc://{bare}"):
        await connect(f"grpcs://{bare}", key)
    # Long before a scheduler that is merely away would be given up.
    assert time.monotonic() - began < 60


async def test_arguments_that_contradict_each_other(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="tls_ca"):
        ot.connect("grpc://127.0.0.1:1", tls_ca=certs / "ca.pem")
    with pytest.raises(errors.InvalidArgument, match="tls_cert"):
        ot.connect(state_dir=tmp_path, tls_cert=certs / "client.pem")
    with pytest.raises(errors.InvalidArgument, match="tls_key"):
        ot.connect("127.0.0.1:1", tls_cert=certs / "client.pem")
