"""Forward and backward passes over a request: sums of losses, gradients and per-token results.

Every sum runs over loss tokens; denominators come with the components. So any cut into micro-batches gives
the same loss, gradient and metrics up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.losses import Component, CrossEntropy
from opentinker_trainer.domain.plan import PADDING, Layout, PlanSettings, layout, plan
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.logprobs import TokenScores, token_scores
from opentinker_trainer.engine.losses import Metrics, TokenInputs, token_losses
from opentinker_trainer.engine.numerics import accumulator
from opentinker_trainer.engine.policy import RESOLVED, Gradient

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Launch settings of the passes."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    logit_rows: int = 256
    """How many rows of logits [logit_rows, V] exist at a time."""


@dataclass(slots=True)
class SampleScores:
    """Per-token results of one sample, [L]; 0 where not computed."""

    logprobs: Array
    entropy: Array
    skipped: bool = False


@dataclass(slots=True)
class ForwardOutput:
    """What a Forward computed."""

    scores: list[SampleScores]
    metrics: Metrics


@dataclass(slots=True)
class BackwardOutput:
    """What a ForwardBackward computed; the gradients are not yet the policy's."""

    loss_sums: dict[str, tuple[float, float]]
    """Component -> (sum over its loss tokens, how many these are), before denominator and coefficient."""
    gradients: dict[str, Gradient]
    scores: list[SampleScores]
    metrics: Metrics
    trained_tokens: int


class Compute:
    """Runs passes of whatever adapter is active in the model."""

    def __init__(self, base: BaseModel, settings: ComputeSettings) -> None:
        self._base = base
        self._settings = settings
        share = settings.plan.share_prefix and base.full_attention
        self._plan = PlanSettings(
            settings.plan.token_budget, settings.plan.max_rows, share, settings.plan.max_shared_row_tokens
        )

    def forward(self, samples: Sequence[Sample]) -> ForwardOutput:
        """Logprobs and entropy at the loss tokens of each sample, without gradients."""
        scores = _empty_scores(samples)
        metrics: Metrics = {}
        with torch.no_grad():
            for batch in plan(samples, _with_loss_tokens(samples), self._plan):
                cut = layout(batch, samples)
                result = self._score(cut, samples, entropy=True)
                _scatter(scores, cut, result)
                _add(metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))
        return ForwardOutput(scores, metrics)

    def forward_backward(
        self,
        samples: Sequence[Sample],
        components: Sequence[Component],
        parameters: dict[str, Tensor],
        *,
        skip_inert: bool,
    ) -> BackwardOutput:
        """Losses, and the gradient of coefficient * sum / denominator with respect to `parameters`.

        With `skip_inert` rows that cannot contribute are left out: their losses are 0 and still count as loss
        tokens, their logprobs are not computed.
        """
        wanted = _with_loss_tokens(samples)
        if skip_inert:
            wanted = [index for index in wanted if not samples[index].is_inert(components)]
        scores = _empty_scores(samples)
        for index in set(_with_loss_tokens(samples)) - set(wanted):
            scores[index].skipped = True
        # A deferred component is there even where nothing contributes: OptimStep carries its denominator.
        gradients: dict[str, Gradient] = {c.name: {} for c in components if c.denominator is None}
        output = BackwardOutput(_empty_sums(samples, components), gradients, scores, {}, 0)
        for batch in plan(samples, wanted, self._plan):
            cut = layout(batch, samples)
            result = self._score(cut, samples, entropy=True)
            self._backward(cut, samples, components, result, parameters, output)
            _scatter(scores, cut, result)
            output.trained_tokens += len(cut.tokens)
        _summarize(output, samples, components)
        return output

    def _score(self, cut: Layout, samples: Sequence[Sample], *, entropy: bool) -> TokenScores:
        hidden = self._base.decoder(
            input_ids=torch.from_numpy(cut.token_ids),
            position_ids=torch.from_numpy(cut.position_ids) if cut.shared else None,
            attention_mask=self._mask(cut) if cut.shared else None,
            use_cache=False,
        ).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(cut.sources)]
        weight, bias = self._base.output
        dtype = accumulator(weight.dtype)
        targets = np.array([samples[s].token_ids[t] for s, t in _pairs(cut)], np.int64)
        temperatures = np.array([samples[s].temperature for s in cut.samples])
        return token_scores(
            rows,
            weight,
            bias,
            torch.from_numpy(targets),
            torch.from_numpy(temperatures).to(dtype),
            chunk=self._settings.logit_rows,
            entropy=entropy,
        )

    def _mask(self, cut: Layout) -> Tensor:
        """Additive attention mask [B, 1, L, L]. A padded column sees itself, or its softmax were 0 / 0."""
        segments = torch.from_numpy(cut.segments)
        query, key = segments[:, :, None], segments[:, None, :]
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = causal & (key != PADDING) & ((key == 0) | (key == query))
        allowed |= torch.eye(length, dtype=torch.bool)
        dtype = self._base.output[0].dtype
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min)
        return mask[:, None]

    def _backward(
        self,
        cut: Layout,
        samples: Sequence[Sample],
        components: Sequence[Component],
        result: TokenScores,
        parameters: dict[str, Tensor],
        output: BackwardOutput,
    ) -> None:
        terms: dict[str, Tensor] = {}
        for component in components:
            chosen = torch.from_numpy(
                np.flatnonzero([samples[index].has(component) for index in cut.samples])
            )
            if not len(chosen):
                continue
            inputs = _inputs(cut, samples, component, chosen, result.logprobs.dtype)
            losses, metrics = token_losses(component.loss, result.logprobs[chosen], inputs)
            total = float(losses.detach().double().sum())
            done, count = output.loss_sums[component.name]
            output.loss_sums[component.name] = (done + total, count)
            for name, (value, weight) in metrics.items():
                _add(output.metrics, name, value, weight)
            bucket = RESOLVED if component.denominator is not None else component.name
            term = losses.sum() * component.factor
            terms[bucket] = terms[bucket] + term if bucket in terms else term
        _add(output.metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))
        names, tensors = list(parameters), list(parameters.values())
        for number, (bucket, term) in enumerate(terms.items()):
            gradients = torch.autograd.grad(term, tensors, retain_graph=number + 1 < len(terms))
            kept = output.gradients.get(bucket)
            if not kept:
                output.gradients[bucket] = dict(zip(names, gradients, strict=True))
            else:
                for name, gradient in zip(names, gradients, strict=True):
                    kept[name].add_(gradient)


def _pairs(cut: Layout) -> list[tuple[int, int]]:
    return list(zip(cut.samples.tolist(), cut.tokens.tolist(), strict=True))


def _with_loss_tokens(samples: Sequence[Sample]) -> list[int]:
    return [index for index, sample in enumerate(samples) if sample.loss_mask.any()]


def _empty_scores(samples: Sequence[Sample]) -> list[SampleScores]:
    return [
        SampleScores(np.zeros(sample.length, np.float32), np.zeros(sample.length, np.float32))
        for sample in samples
    ]


def _empty_sums(samples: Sequence[Sample], components: Sequence[Component]) -> dict[str, tuple[float, float]]:
    return {
        component.name: (0.0, float(sum(s.loss_tokens for s in samples if s.has(component))))
        for component in components
    }


def _scatter(scores: list[SampleScores], cut: Layout, result: TokenScores) -> None:
    logprobs = result.logprobs.detach().float().numpy()
    entropy = result.entropy.float().numpy()
    for at, (sample, token) in enumerate(_pairs(cut)):
        scores[sample].logprobs[token] = logprobs[at]
        scores[sample].entropy[token] = entropy[at]


def _inputs(
    cut: Layout, samples: Sequence[Sample], component: Component, chosen: Tensor, dtype: torch.dtype
) -> TokenInputs:
    pairs = [_pairs(cut)[at] for at in chosen.tolist()]

    def gather(name: str) -> Tensor | None:
        arrays = [getattr(samples[sample], name) for sample, _ in pairs]
        if all(array is None for array in arrays):
            return None
        values = [
            1.0 if array is None else array[token] for array, (_, token) in zip(arrays, pairs, strict=True)
        ]
        return torch.tensor(np.array(values, np.float64), dtype=dtype)

    if isinstance(component.loss, CrossEntropy):
        return TokenInputs(None, None, gather("weights"))
    return TokenInputs(gather("behavior_logprobs"), gather("advantages"), None)


def _add(metrics: Metrics, name: str, value: float, weight: float) -> None:
    done, count = metrics.get(name, (0.0, 0.0))
    metrics[name] = (done + value, count + weight)


def _summarize(output: BackwardOutput, samples: Sequence[Sample], components: Sequence[Component]) -> None:
    """Metrics that are known at the end. Rows left out count with their loss of 0."""
    for component in components:
        total, count = output.loss_sums[component.name]
        _add(output.metrics, f"loss/{component.name}", total, count)
        if component.needs_behavior:
            _add(output.metrics, "actor/pg_loss", total, count)
    rows = float(len(samples))
    _add(output.metrics, "rows/skipped", float(sum(score.skipped for score in output.scores)), rows)
