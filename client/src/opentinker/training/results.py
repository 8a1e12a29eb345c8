"""Results of policy operations, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import loss_pb2
from opentinkerapi.runtime.tensors import unpack_floats
from opentinkerapi.trainer.v1 import operation_pb2


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum and its weight, so that means over any split are exact."""

    sum: float
    weight: float

    @property
    def mean(self) -> float:
        """sum / weight; 0 where nothing was counted."""
        return self.sum / self.weight if self.weight else 0.0


Metrics = Mapping[str, Sum]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logprobs of each sample, [n] float32 with 0 where none was computed; None for a row left out as
    inert. `entropy` and `values` are empty arrays where they were not asked for.
    """

    logprobs: Sequence[NDArray[np.float32] | None] = ()
    entropy: Sequence[NDArray[np.float32] | None] = ()
    values: Sequence[NDArray[np.float32] | None] = ()
    metrics: Metrics = field(default_factory=dict)
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult(ForwardResult):
    """What was added to the gradient. `components` are sums over loss tokens, before any denominator."""

    components: Metrics = field(default_factory=dict)
    trained_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an optimizer step did. `skipped`: the gradient was not finite and nothing changed."""

    step: int
    grad_norm: float
    skipped: bool = False
    consecutive_skips: int = 0
    metrics: Metrics = field(default_factory=dict)
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to resume a policy."""

    name: str
    step: int
    version: int
    sha256: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Version:
    """A set of published weights."""

    policy: str
    version: int
    sha256: str
    step: int = 0
    engine_seconds: float = 0.0


def engine_seconds(wire: operation_pb2.Operation) -> float:
    """Time inside the engine process."""
    return wire.engine_time.ToTimedelta().total_seconds()


def sums(metrics: Sequence[loss_pb2.Metric]) -> dict[str, Sum]:
    """Metrics of a message by name."""
    return {metric.name: Sum(metric.sum, metric.weight) for metric in metrics}


def rows(
    outputs: Sequence[operation_pb2.SampleOutput], field_name: str
) -> tuple[NDArray[np.float32] | None, ...]:
    """One array a sample; None where the row was left out."""
    return tuple(None if output.skipped else unpack_floats(getattr(output, field_name)) for output in outputs)


def checkpoint(wire: policy_pb2.Checkpoint) -> Checkpoint:
    """From a message."""
    return Checkpoint(wire.name, wire.step, wire.version, wire.sha256, wire.size_bytes)


def step_result(wire: operation_pb2.Operation) -> StepResult:
    """Of an OptimStep."""
    result = wire.optim_step
    return StepResult(
        step=result.step,
        grad_norm=result.grad_norm,
        skipped=result.skipped,
        consecutive_skips=result.consecutive_skips,
        metrics=sums(result.metrics),
        engine_seconds=engine_seconds(wire),
    )


def version(wire: operation_pb2.Operation) -> Version:
    """Of a PublishWeights."""
    published = wire.publish_weights.version
    return Version(
        published.policy, published.version, published.sha256, published.step, engine_seconds(wire)
    )


def forward(wire: operation_pb2.Operation, outputs: Sequence[operation_pb2.SampleOutput]) -> ForwardResult:
    """Of a Forward."""
    return ForwardResult(
        logprobs=rows(outputs, "logprobs"),
        entropy=rows(outputs, "entropy"),
        values=rows(outputs, "values"),
        metrics=sums(wire.forward.metrics),
        engine_seconds=engine_seconds(wire),
    )


def forward_backward(
    wire: operation_pb2.Operation, outputs: Sequence[operation_pb2.SampleOutput]
) -> ForwardBackwardResult:
    """Of a ForwardBackward."""
    result = wire.forward_backward
    return ForwardBackwardResult(
        logprobs=rows(outputs, "logprobs"),
        metrics=sums(result.metrics),
        engine_seconds=engine_seconds(wire),
        components={part.component: Sum(part.loss_sum, part.weight) for part in result.components},
        trained_tokens=result.trained_tokens,
    )
