"""One trace through a client and a server: what the metadata carries, whose span is part of whose."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from opentinker_kit.testing import wait_until
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub
from opentinkerapi.runtime import tracing

from .conftest import Start
from .test_interceptors import DOWNLOAD, SAMPLE, UPLOAD, failure


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    yield exporter
    provider.shutdown()


def ended(spans: InMemorySpanExporter) -> tuple[ReadableSpan, ...]:
    return spans.get_finished_spans()


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name.endswith(name)]


async def test_a_call_is_a_part_of_what_made_it(start: Start, spans: InMemorySpanExporter) -> None:
    running = await start()
    async with running.channel() as channel:
        with tracing.span("work"):
            await BlobServiceStub(channel).CreateUpload(UPLOAD)
            async for _ in InferenceServiceStub(channel).Sample(SAMPLE):
                pass
    await wait_until(lambda: len(spans.get_finished_spans()) == 5, 10)
    (work,) = named(spans, "work")
    for method in ("BlobService/CreateUpload", "InferenceService/Sample"):
        client, server = sorted(named(spans, method), key=lambda span: span.kind.name)
        assert (client.kind.name, server.kind.name) == ("CLIENT", "SERVER")
        assert client.parent is not None
        assert server.parent is not None
        assert client.parent.span_id == work.context.span_id
        assert server.parent.span_id == client.context.span_id
        assert server.context.trace_id == work.context.trace_id
        assert server.attributes == {"opentinker.outcome": "OK"}


async def test_what_fails_is_marked(start: Start, spans: InMemorySpanExporter) -> None:
    async def broken() -> None:
        raise RuntimeError("boom")

    running = await start()
    running.behavior.upload = broken
    async with running.channel() as channel:
        await failure(BlobServiceStub(channel).CreateUpload(UPLOAD))
        # Refused at the door: the client's span alone.
        await failure(BlobServiceStub(channel).GetDownload(DOWNLOAD))
    await wait_until(lambda: len(spans.get_finished_spans()) == 3, 10)
    outcomes = {(span.kind.name, (span.attributes or {})["opentinker.outcome"]) for span in ended(spans)}
    assert outcomes == {("CLIENT", "INTERNAL"), ("SERVER", "INTERNAL"), ("CLIENT", "PERMISSION_DENIED")}
    assert all(not span.status.is_ok for span in spans.get_finished_spans())


async def test_work_goes_on_in_the_trace_that_ordered_it(spans: InMemorySpanExporter) -> None:
    with tracing.span("order"):
        ordered = tracing.current()
    with tracing.span("other"), tracing.span("work", ordered, seq=3):
        await asyncio.sleep(0)
    (order,), (work,) = named(spans, "order"), named(spans, "work")
    assert work.context.trace_id == order.context.trace_id
    assert work.attributes == {"seq": 3}


async def test_off_nothing_is_sent_and_nothing_made(start: Start) -> None:
    assert not tracing.is_on()
    assert tracing.current() == ""
    with tracing.span("work"):
        assert tracing.calling("/a/B")[0] == ()
    running = await start()
    async with running.channel(key="caller-key") as channel:
        assert await BlobServiceStub(channel).CreateUpload(UPLOAD)


def test_spans_are_appended_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tracing, "_tracer", None)
    tracing.configure("a service")
    assert not tracing.is_on()
    tracing.configure("a service", file=tmp_path / "spans.jsonl")
    for name in ("one", "two"):
        with tracing.span(name):
            pass
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["one", "two"]
    assert lines[0]["resource"]["attributes"]["service.name"] == "a service"
