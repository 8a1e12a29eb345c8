"""Traces through all processes of a cluster (OpenTelemetry). Off, and then free, until `configure` is called.

(Needs the extra `traces`.) What runs is a span; a call carries its span in its metadata as W3C `traceparent`,
so that what the other side does belongs to the same trace. Within a process spans follow the tasks.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from opentinkerapi.runtime.errors import MissingDependency
from opentinkerapi.runtime.reasons import Reason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

P = ParamSpec("P")
T = TypeVar("T")
Ended = Callable[[str], None]
"""Told how it ended: OK, or why not."""

TRACEPARENT = "traceparent"
OK = "OK"

_tracer: "Tracer | None" = None
_watching: set["asyncio.Task[None]"] = set()


def configure(service: str, *, endpoint: str = "", file: str | Path | None = None) -> None:
    """Send this process's spans to an OTLP collector (`http://host:4318/v1/traces`), or append them to a
    file, one JSON object a line. Neither: nothing. A second call changes nothing.

    MissingDependency without the extra.
    """
    global _tracer
    if _tracer is not None or not (endpoint or file):
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    except ImportError:
        raise _missing() from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    if endpoint:
        provider.add_span_processor(BatchSpanProcessor(_otlp(endpoint)))
    if file:
        provider.add_span_processor(SimpleSpanProcessor(_file_exporter(Path(file))))
    _tracer = provider.get_tracer("opentinker")


def is_on() -> bool:
    """Whether spans go anywhere."""
    return _tracer is not None


@contextmanager
def span(name: str, parent: str = "", **attributes: str | int) -> Iterator[None]:
    """What runs within is a span: a part of the current one, or of the one that the traceparent `parent`
    names.
    """
    if _tracer is None:
        yield
        return
    context = _context({TRACEPARENT: parent}) if parent else None
    with _tracer.start_as_current_span(name, context=context, attributes=attributes):
        yield


def traced(name: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Make each run of a coroutine function a span."""

    def wrap(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return await function(*args, **kwargs)

        return run

    return wrap


def current() -> str:
    """The current span as a traceparent; empty where there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(TRACEPARENT, "")


def serving(method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Ended:
    """Begin the span of a call that is answered; the rest of the task is within it. Returns what ends it."""
    if _tracer is None:
        return _nothing
    from opentelemetry import context, trace

    carrier = {key: str(value) for key, value in metadata if key == TRACEPARENT}
    begun = _tracer.start_span(
        method.removeprefix("/"), context=_context(carrier), kind=trace.SpanKind.SERVER
    )
    # Not detached: each call has a task of its own.
    context.attach(trace.set_span_in_context(begun))
    return functools.partial(_end, begun)


def calling(method: str) -> tuple[tuple[tuple[str, str], ...], Callable[[Any], Any]]:
    """Begin the span of a call that is made: what its metadata gets, and what the call goes through."""
    if _tracer is None:
        return (), _same
    from opentelemetry import trace

    begun = _tracer.start_span(method.removeprefix("/"), kind=trace.SpanKind.CLIENT)
    with trace.use_span(begun):
        pairs = ((TRACEPARENT, current()),)

    def watch(call: Any) -> Any:
        task = asyncio.get_running_loop().create_task(_watch(begun, call))
        _watching.add(task)
        task.add_done_callback(_watching.discard)
        return call

    return pairs, watch


async def _watch(begun: "Span", call: Any) -> None:
    code: Callable[[], Awaitable[Any]] = call.code
    try:
        _end(begun, (await code()).name)
    except BaseException:
        _end(begun, "CANCELLED")
        raise


def _end(begun: "Span", outcome: str) -> None:
    from opentelemetry.trace import StatusCode

    begun.set_attribute("opentinker.outcome", outcome)
    if outcome != OK:
        begun.set_status(StatusCode.ERROR, outcome)
    begun.end()


def _context(carrier: Mapping[str, str]) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(carrier, context=Context())


def _otlp(endpoint: str) -> "SpanExporter":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise _missing() from None
    return OTLPSpanExporter(endpoint=endpoint)


def _file_exporter(path: Path) -> "SpanExporter":
    import os

    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    # Several processes append to one file: a line is one write.
    file = open(path, "ab", buffering=0)  # noqa: SIM115  # for as long as the process runs

    class Lines:
        def write(self, text: str) -> None:
            file.write(text.encode())

        def flush(self) -> None:
            return None

    lines: Any = Lines()
    return ConsoleSpanExporter(out=lines, formatter=lambda done: done.to_json(indent=None) + os.linesep)


def _missing() -> MissingDependency:
    text = 'traces need OpenTelemetry; run: pip install "opentinker-api[traces]"'
    return MissingDependency(text, reason=Reason.MISSING_DEPENDENCY)


def _nothing(_: str) -> None:
    return None


def _same(call: Any) -> Any:
    return call
