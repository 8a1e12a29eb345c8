"""Metrics as Prometheus reads them, over HTTP, from a real server."""

import asyncio
import json
import ssl
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from opentinker_kit.metrics import MAX_SETS, NoMetrics, PrometheusMetrics
from opentinker_kit.settings import ServerSettings, TlsSettings
from opentinker_kit.testing.metrics import Page, scrape
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime.certificates import make_certificates

from .conftest import Running, Start
from .test_interceptors import DOWNLOAD, SAMPLE, UPLOAD, failure


async def read(running: Running, **options: Any) -> Page:
    return await asyncio.to_thread(scrape, running.server.metrics_port, **options)


async def test_calls_are_counted_by_method_and_reason(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    running = await start(metrics_port=0, ready_file=ready)
    assert json.loads(ready.read_text())["metrics_port"] == running.server.metrics_port > 0
    async with running.channel() as channel:
        for _ in range(3):
            await BlobServiceStub(channel).CreateUpload(UPLOAD)
        async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
            pass
        await failure(BlobServiceStub(channel).GetDownload(DOWNLOAD))
        await failure(channel.unary_unary("/made.up/Method")(b""))
    page = await read(running)
    count = "opentinker_rpc_seconds_count"
    upload = "run.v1.BlobService/CreateUpload"
    assert page.value(count, method=upload, reason="OK") == 3
    assert page.value(count, method="inference.v1.InferenceService/Sample", reason="OK") == 1
    assert page.value(count, method="run.v1.BlobService/GetDownload", reason="PERMISSION_DENIED") == 1
    assert page.value(count, method="other", reason="PERMISSION_DENIED") == 1
    assert page.value("opentinker_rpc_seconds_bucket", method=upload, reason="OK", le="+Inf") == 3
    assert page.value("process_resident_memory_bytes") > 0


async def test_nothing_listens_unless_it_is_asked_for(start: Start) -> None:
    running = await start()
    assert running.server.metrics_port == 0
    assert isinstance(running.server.metrics, NoMetrics)
    running.server.metrics.counter("some_counter", "Some.")(2.0)


async def test_what_is_shown_is_looked_up_and_bounded(start: Start) -> None:
    running = await start(metrics_port=0)
    metrics = running.server.metrics
    open_ones = {("a",): 2.0}
    metrics.read("some_gauge", "Some.", lambda: open_ones, ("project",))
    metrics.read("some_sum", "Some.", lambda: {(): 7.0}, grows=True)
    add = metrics.counter("some_counter", "Some.", ("project",))
    for number in range(MAX_SETS + 5):
        add(1.0, f"p{number}")
        open_ones[f"p{number}",] = 1.0
    add(1.0, "p1")
    page = await read(running)
    assert page.value("some_gauge", project="a") == 2
    assert page.value("some_gauge", project="other") == 6
    assert page.value("some_counter_total", project="p1") == 2
    assert page.value("some_counter_total", project="other") == 5
    assert page.value("some_sum_total") == 7
    open_ones.clear()
    assert "some_gauge{" not in (await read(running)).text


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/", "GET", 404), ("/metrics/x", "GET", 404), ("/metrics", "POST", 405)]
)
async def test_there_is_one_page(start: Start, path: str, method: str, status: int) -> None:
    running = await start(metrics_port=0)
    with pytest.raises(urllib.error.HTTPError) as caught:
        await read(running, path=path, method=method)
    assert caught.value.code == status


async def test_a_key_is_asked_for_where_there_is_one(start: Start, tmp_path: Path) -> None:
    key_file = tmp_path / "metrics.key"
    key_file.touch(mode=0o600)
    key_file.write_text("secret")
    running = await start(metrics_port=0, metrics_key_file=key_file)
    assert "process_" in (await read(running, key="secret")).text
    for wrong in ("", "Secret", "secret2"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            await read(running, key=wrong)
        assert caught.value.code == 401


def test_beyond_loopback_a_key_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metrics_key_file"):
        ServerSettings(metrics_port=0, metrics_host="0.0.0.0")
    assert ServerSettings(metrics_port=0, metrics_host="0.0.0.0", metrics_key_file=tmp_path / "key")


async def test_they_are_read_by_tls_where_the_server_speaks_it(start: Start, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files: Mapping[str, Path] = {
        "certificate_file": tmp_path / "server.pem",
        "key_file": tmp_path / "server.key",
        "client_ca_file": tmp_path / "ca.pem",
    }
    running = await start(metrics_port=0, tls=TlsSettings(**files))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with pytest.raises(OSError, match=r"(?i)certificate.required|reset|EOF|closed"):
        await read(running, tls=context)
    context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
    assert "process_" in (await read(running, tls=context)).text


async def test_whoever_says_nothing_is_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker_kit.metrics_page._PATIENCE_S", 0.1)
    running = await start(metrics_port=0)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.metrics_port)
    assert await asyncio.wait_for(reader.read(), timeout=10) == b""
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.metrics_port)
    writer.write(b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000)
    assert b"200 OK" not in await asyncio.wait_for(reader.read(), timeout=10)
    writer.close()
    assert "process_" in (await read(running)).text


def test_two_servers_of_a_process_do_not_mix() -> None:
    first, second = PrometheusMetrics(), PrometheusMetrics()
    first.counter("some_counter", "Some.")(3.0)
    assert Page(first.page().decode()).value("some_counter_total") == 3
    assert "some_counter" not in second.page().decode()
