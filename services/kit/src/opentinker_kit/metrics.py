"""What a server counts, for Prometheus. Off unless `metrics_port` is set; then `metrics_page` serves it.

Labels hold names that somebody else may make up (projects, methods), so each metric takes so many sets of
them and counts the rest under `other`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from opentinker_kit.interceptors import EndedCall

if TYPE_CHECKING:
    from prometheus_client import Metric

Labels = tuple[str, ...]
Values = Callable[[], Mapping[Labels, float]]

MAX_SETS = 500
"""Sets of labels of one metric."""
OTHER = "other"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PACKAGE = "/opentinkerapi."


class Metrics(Protocol):
    """Where a server's parts say what there is to count. Without `metrics_port` nothing becomes of it."""

    def counter(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        """A number that grows: called with how much, and the values of the labels."""
        ...

    def timer(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        """How long something took: called with seconds, and the values of the labels."""
        ...

    def read(self, name: str, text: str, values: Values, labels: Labels = (), *, grows: bool = False) -> None:
        """A number that is looked up when somebody asks, on the event loop; `grows`: never falls."""
        ...

    def call(self, ended: EndedCall) -> None:
        """Count a call."""
        ...


class NoMetrics:
    """Counts nothing."""

    def counter(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        return _nothing

    def timer(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        return _nothing

    def read(self, name: str, text: str, values: Values, labels: Labels = (), *, grows: bool = False) -> None:
        return None

    def call(self, ended: EndedCall) -> None:
        return None


class PrometheusMetrics:
    """Counts in a registry of its own, so that two servers in one process do not mix."""

    def __init__(self, methods: Collection[str] = ()) -> None:
        """`methods` are the full names of those that calls are told apart by."""
        # Takes a while to import, and most servers run without.
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._registry = CollectorRegistry()
        self._methods = {name: name.removeprefix(_PACKAGE).removeprefix("/") for name in methods}
        ProcessCollector(registry=self._registry)
        self._calls = self.timer(
            "opentinker_rpc_seconds", "Calls that ended, by method and outcome.", ("method", "reason")
        )

    def counter(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        from prometheus_client import Counter

        made, bounded = Counter(name, text, labels, registry=self._registry), _Bounded()

        def add(amount: float = 1.0, *values: str) -> None:
            (made.labels(*bounded(values)) if labels else made).inc(amount)

        return add

    def timer(self, name: str, text: str, labels: Labels = ()) -> Callable[..., None]:
        from prometheus_client import Histogram

        made, bounded = Histogram(name, text, labels, registry=self._registry, buckets=SECONDS), _Bounded()

        def took(seconds: float, *values: str) -> None:
            (made.labels(*bounded(values)) if labels else made).observe(seconds)

        return took

    def read(self, name: str, text: str, values: Values, labels: Labels = (), *, grows: bool = False) -> None:
        self._registry.register(_Looked(name, text, values, labels, grows))

    def call(self, ended: EndedCall) -> None:
        self._calls(ended.seconds, self._methods.get(ended.method, OTHER), ended.outcome)

    def page(self) -> bytes:
        """All of it, in Prometheus' text format. On the event loop."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class _Bounded:
    """Lets so many sets of labels through."""

    def __init__(self) -> None:
        self._known: set[Labels] = set()

    def __call__(self, values: Labels) -> Labels:
        if values in self._known:
            return values
        if len(self._known) >= MAX_SETS:
            return (OTHER,) * len(values)
        self._known.add(values)
        return values


class _Looked:
    """A metric whose values are looked up when the page is made."""

    def __init__(self, name: str, text: str, values: Values, labels: Labels, grows: bool) -> None:
        self._name, self._text, self._labels, self._grows = name, text, labels, grows
        self._values = values

    def describe(self) -> Iterator["Metric"]:
        """What it is, without looking."""
        yield self._empty()

    def collect(self) -> Iterator["Metric"]:
        """What it is now; what does not fit is added up."""
        metric, rest = self._empty(), 0.0
        name = f"{self._name}_total" if self._grows else self._name
        for number, (labels, value) in enumerate(self._values().items()):
            if number < MAX_SETS:
                metric.add_sample(name, dict(zip(self._labels, labels, strict=True)), value)
            else:
                rest += value
        if rest:
            metric.add_sample(name, dict.fromkeys(self._labels, OTHER), rest)
        yield metric

    def _empty(self) -> "Metric":
        from prometheus_client import Metric

        return Metric(self._name, self._text, "counter" if self._grows else "gauge")


def _nothing(*_: object) -> None:
    return None
