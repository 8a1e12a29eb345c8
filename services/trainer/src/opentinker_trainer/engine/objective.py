"""Losses of a request: each component's sum, the gradient, metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.losses import Component, Entropy
from opentinker_trainer.domain.plan import Layout
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.columns import Array, Columns
from opentinker_trainer.engine.logprobs import TokenScores
from opentinker_trainer.engine.losses import token_losses
from opentinker_trainer.engine.model_view import ModelView
from opentinker_trainer.engine.policy import RESOLVED, Gradient
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.token_inputs import TokenInputs
from opentinker_trainer.engine.weights import accumulate

Metrics = dict[str, tuple[float, float]]
"""Metric name -> (sum, weight); the mean is sum / weight."""


@dataclass(slots=True)
class SampleScores:
    """Per-token results of one sample, [L]; 0 where not computed."""

    logprobs: Array
    entropy: Array
    values: Array | None = None
    """None for policies without a value head."""
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
    view: ModelView,
    output: BackwardOutput,
) -> None:
    """Add the losses of a scored micro-batch, their gradient and metrics to `output`."""
    terms: dict[str, Tensor] = {}
    for component in components:
        chosen = np.flatnonzero(np.array([sample.has(component) for sample in samples])[cut.samples])
        if not len(chosen):
            continue
        at = torch.from_numpy(chosen).to(result.logprobs.device)
        inputs = _inputs(cut, columns, chosen, result, at)
        losses, metrics = token_losses(component, result.logprobs[at], inputs)
        done, count = output.loss_sums[component.name]
        total, *sums = _sums([losses, *metrics.values()])
        output.loss_sums[component.name] = (done + total, count)
        for name, value in zip(metrics, sums, strict=True):
            add_metric(output.metrics, name, value, len(chosen))
        bucket = RESOLVED if component.denominator is not None else component.name
        term = losses.sum() * component.factor
        terms[bucket] = terms[bucket] + term if bucket in terms else term
    (entropy,) = _sums([result.entropy])
    add_metric(output.metrics, "actor/entropy", entropy, len(cut.tokens))
    if view.in_step:
        terms = _of_every_bucket(terms, components, result)
    for number, (bucket, term) in enumerate(terms.items()):
        view.differentiate(term, output.gradients.setdefault(bucket, {}), keep_graph=number + 1 < len(terms))


def empty_part(components: Sequence[Component], gradients: dict[str, Gradient]) -> BackwardOutput:
    """Of a micro-batch of which nothing is computed yet; its gradients will be added to `gradients`."""
    return BackwardOutput({component.name: (0.0, 0.0) for component in components}, gradients, [], {}, 0)


def add_part(part: BackwardOutput, output: BackwardOutput) -> None:
    """Add a micro-batch's sums, metrics and, where it has one of its own, gradient to those of its pass."""
    for name, (total, _) in part.loss_sums.items():
        done, count = output.loss_sums[name]
        output.loss_sums[name] = (done + total, count)
    if part.gradients is not output.gradients:
        for bucket, gradient in part.gradients.items():
            accumulate(gradient, output.gradients.setdefault(bucket, {}))
    for name, (total, weight) in part.metrics.items():
        add_metric(output.metrics, name, total, weight)
    output.trained_tokens += part.trained_tokens


def take_part(
    components: Sequence[Component], result: TokenScores, view: ModelView, output: BackwardOutput
) -> None:
    """Of a micro-batch that only keeps this rank in step with the others: a gradient of 0."""
    terms = _of_every_bucket({}, components, result)
    for number, (bucket, term) in enumerate(terms.items()):
        view.differentiate(term, output.gradients.setdefault(bucket, {}), keep_graph=number + 1 < len(terms))


def _of_every_bucket(
    terms: dict[str, Tensor], components: Sequence[Component], result: TokenScores
) -> dict[str, Tensor]:
    """The term of each bucket of the request, in the same order on every rank, and each of them a function of
    the whole model.
    """
    nothing = result.logprobs.sum() * 0.0
    buckets = dict.fromkeys(RESOLVED if c.denominator is not None else c.name for c in components)
    return {bucket: terms[bucket] + nothing if bucket in terms else nothing for bucket in buckets}


def _sums(tensors: Sequence[Tensor]) -> list[float]:
    """The sum of each, in float64; one transfer from the device."""
    with torch.no_grad():
        values: list[float] = torch.stack([tensor.double().sum() for tensor in tensors]).tolist()
    return values


def needs_entropy_gradient(components: Sequence[Component]) -> bool:
    """Whether a component moves the entropy, so that the scores of a pass must carry its gradient."""
    return any(isinstance(component.loss, Entropy) for component in components)


def empty_sums(samples: Sequence[Sample], components: Sequence[Component]) -> dict[str, tuple[float, float]]:
    """Component -> (0, its loss tokens)."""
    return {
        component.name: (0.0, float(sum(s.loss_tokens for s in samples if s.has(component))))
        for component in components
    }


def _inputs(
    cut: Layout, columns: Columns, chosen: NDArray[np.int64], result: TokenScores, at: Tensor
) -> TokenInputs:
    """What the losses of the tokens `chosen` [n] read; `at` is `chosen` as a tensor on the model's device."""
    positions = columns.positions(cut)[chosen]
    _, sequences = np.unique(cut.samples[chosen], return_inverse=True)
    arrays = {
        name: torch.from_numpy(column[positions]).to(result.logprobs)
        for name, column in columns.arrays.items()
    }
    return TokenInputs(
        torch.from_numpy(sequences).to(result.logprobs.device),
        entropy=result.entropy[at] if len(result.entropy) else None,
        values=None if result.values is None else result.values[at],
        **arrays,
    )


def add_metric(metrics: Metrics, name: str, value: float, weight: float) -> None:
    """Add a sum and its weight to a metric."""
    done, count = metrics.get(name, (0.0, 0.0))
    metrics[name] = (done + value, count + weight)


def summarize(output: BackwardOutput, samples: Sequence[Sample], components: Sequence[Component]) -> None:
    """Metrics that are known at the end. Rows left out count with their loss of 0."""
    for component in components:
        total, count = output.loss_sums[component.name]
        add_metric(output.metrics, f"loss/{component.name}", total, count)
        if component.is_policy:
            add_metric(output.metrics, "actor/pg_loss", total, count)
    rows = float(len(samples))
    add_metric(output.metrics, "rows/skipped", float(sum(score.skipped for score in output.scores)), rows)


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Metrics of several ranks together, as one rank would have summed them."""
    merged: Metrics = {}
    for part in parts:
        for name, (total, weight) in part.items():
            add_metric(merged, name, total, weight)
    return merged


def add_ranks(output: BackwardOutput, ranks: Ranks) -> None:
    """Add what other ranks summed; loss tokens are those of the whole request on every rank. Collective."""
    if ranks.count == 1:
        return
    sums = {name: total for name, (total, _) in output.loss_sums.items()}
    parts = ranks.gather([sums, output.metrics, output.trained_tokens])
    for name, (_, count) in output.loss_sums.items():
        output.loss_sums[name] = (sum(part[0][name] for part in parts), count)
    output.metrics = merge_metrics([part[1] for part in parts])
    output.trained_tokens = sum(part[2] for part in parts)
