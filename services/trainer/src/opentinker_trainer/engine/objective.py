"""Losses of a request: each component's sum, the gradient, metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinker_trainer.domain.plan import Layout
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.columns import Array, Columns
from opentinker_trainer.engine.logprobs import TokenScores
from opentinker_trainer.engine.losses import Metrics, TokenInputs, token_losses
from opentinker_trainer.engine.policy import RESOLVED, Gradient


@dataclass(slots=True)
class SampleScores:
    """Per-token results of one sample, [L]; 0 where not computed."""

    logprobs: Array
    entropy: Array
    skipped: bool = False


@dataclass(slots=True)
class BackwardOutput:
    """What a ForwardBackward computed; the gradients are not yet the policy's."""

    loss_sums: dict[str, tuple[float, float]]
    """Component -> (sum over its loss tokens, how many these are), before denominator and coefficient."""
    gradients: dict[str, Gradient]
    scores: list[SampleScores]
    metrics: Metrics
    trained_tokens: int


def add_losses(
    cut: Layout,
    samples: Sequence[Sample],
    columns: Columns,
    components: Sequence[Component],
    result: TokenScores,
    parameters: dict[str, Tensor],
    output: BackwardOutput,
) -> None:
    """Add the losses of a scored micro-batch, their gradient and metrics to `output`."""
    terms: dict[str, Tensor] = {}
    for component in components:
        chosen = torch.from_numpy(np.flatnonzero([samples[index].has(component) for index in cut.samples]))
        if not len(chosen):
            continue
        inputs = _inputs(columns, columns.positions(cut)[chosen.numpy()], component, result.logprobs.dtype)
        losses, metrics = token_losses(component.loss, result.logprobs[chosen], inputs)
        total = float(losses.detach().double().sum())
        done, count = output.loss_sums[component.name]
        output.loss_sums[component.name] = (done + total, count)
        for name, (value, weight) in metrics.items():
            add_metric(output.metrics, name, value, weight)
        bucket = RESOLVED if component.denominator is not None else component.name
        term = losses.sum() * component.factor
        terms[bucket] = terms[bucket] + term if bucket in terms else term
    add_metric(output.metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))
    names, tensors = list(parameters), list(parameters.values())
    for number, (bucket, term) in enumerate(terms.items()):
        gradients = torch.autograd.grad(term, tensors, retain_graph=number + 1 < len(terms))
        kept = output.gradients.get(bucket)
        if not kept:
            output.gradients[bucket] = dict(zip(names, gradients, strict=True))
        else:
            for name, gradient in zip(names, gradients, strict=True):
                kept[name].add_(gradient)


def empty_sums(samples: Sequence[Sample], components: Sequence[Component]) -> dict[str, tuple[float, float]]:
    """Component -> (0, its loss tokens)."""
    return {
        component.name: (0.0, float(sum(s.loss_tokens for s in samples if s.has(component))))
        for component in components
    }


def _inputs(
    columns: Columns, positions: NDArray[np.int64], component: Component, dtype: torch.dtype
) -> TokenInputs:
    def gather(column: Array) -> Tensor:
        return torch.from_numpy(column[positions]).to(dtype)

    if isinstance(component.loss, CrossEntropy):
        return TokenInputs(None, None, gather(columns.weights))
    return TokenInputs(gather(columns.behavior_logprobs), gather(columns.advantages), None)


def add_metric(metrics: Metrics, name: str, value: float, weight: float) -> None:
    """Add a sum and its weight to a metric."""
    done, count = metrics.get(name, (0.0, 0.0))
    metrics[name] = (done + value, count + weight)


def summarize(output: BackwardOutput, samples: Sequence[Sample], components: Sequence[Component]) -> None:
    """Metrics that are known at the end. Rows left out count with their loss of 0."""
    for component in components:
        total, count = output.loss_sums[component.name]
        add_metric(output.metrics, f"loss/{component.name}", total, count)
        if component.needs_behavior:
            add_metric(output.metrics, "actor/pg_loss", total, count)
    rows = float(len(samples))
    add_metric(output.metrics, "rows/skipped", float(sum(score.skipped for score in output.scores)), rows)
