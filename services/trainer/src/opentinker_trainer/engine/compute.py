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


@dataclass(slots=True)
class _Scores:
    """Per-token results of all samples end to end, [T]."""

    logprobs: Array
    entropy: Array

    @classmethod
    def empty(cls, columns: "_Columns") -> "_Scores":
        return cls(np.zeros(columns.starts[-1], np.float32), np.zeros(columns.starts[-1], np.float32))

    def put(self, positions: NDArray[np.int64], result: TokenScores) -> None:
        self.logprobs[positions] = result.logprobs.detach().float().numpy()
        self.entropy[positions] = result.entropy.float().numpy()

    def by_sample(self, columns: "_Columns", skipped: frozenset[int]) -> list[SampleScores]:
        pairs = zip(columns.split(self.logprobs), columns.split(self.entropy), strict=True)
        return [
            SampleScores(logprobs, entropy, index in skipped)
            for index, (logprobs, entropy) in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The per-token arrays of all samples end to end, T tokens in all; what is left out is 0, weights 1."""

    starts: NDArray[np.int64]
    """[S + 1]: where each sample begins, and the end."""
    token_ids: NDArray[np.int64]
    behavior_logprobs: Array
    advantages: Array
    weights: Array
    temperatures: NDArray[np.float64]
    """[S]"""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "_Columns":
        def column(name: str, missing: float) -> Array:
            arrays = [getattr(sample, name) for sample in samples]
            filled = [
                np.full(sample.length, missing, np.float32) if array is None else array
                for sample, array in zip(samples, arrays, strict=True)
            ]
            return np.concatenate(filled)

        return cls(
            np.concatenate([[0], np.cumsum([sample.length for sample in samples])]),
            np.concatenate([sample.token_ids for sample in samples]).astype(np.int64),
            column("behavior_logprobs", 0.0),
            column("advantages", 0.0),
            column("weights", 1.0),
            np.array([sample.temperature for sample in samples]),
        )

    def positions(self, cut: Layout) -> NDArray[np.int64]:
        """[N]: where the loss tokens of a layout are."""
        return self.starts[cut.samples] + cut.tokens

    def split(self, column: Array) -> list[Array]:
        """A column of T, by sample."""
        return np.split(column, self.starts[1:-1])


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
        columns = _Columns.of(samples)
        scores = _Scores.empty(columns)
        metrics: Metrics = {}
        with torch.no_grad():
            for batch in plan(samples, _with_loss_tokens(samples), self._plan):
                cut = layout(batch, samples)
                result = self._score(cut, columns)
                scores.put(columns.positions(cut), result)
                _add(metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))
        return ForwardOutput(scores.by_sample(columns, frozenset()), metrics)

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
        trainable = _with_loss_tokens(samples)
        wanted = trainable
        if skip_inert:
            wanted = [index for index in trainable if not samples[index].is_inert(components)]
        columns = _Columns.of(samples)
        scores = _Scores.empty(columns)
        # A deferred component is there even where nothing contributes: OptimStep carries its denominator.
        gradients: dict[str, Gradient] = {c.name: {} for c in components if c.denominator is None}
        output = BackwardOutput(_empty_sums(samples, components), gradients, [], {}, 0)
        for batch in plan(samples, wanted, self._plan):
            cut = layout(batch, samples)
            result = self._score(cut, columns)
            self._backward(cut, samples, columns, components, result, parameters, output)
            scores.put(columns.positions(cut), result)
            output.trained_tokens += len(cut.tokens)
        output.scores = scores.by_sample(columns, frozenset(trainable) - frozenset(wanted))
        _summarize(output, samples, components)
        return output

    def _score(self, cut: Layout, columns: _Columns) -> TokenScores:
        hidden = self._base.decoder(
            input_ids=torch.from_numpy(cut.token_ids),
            position_ids=torch.from_numpy(cut.position_ids) if cut.shared else None,
            attention_mask=self._mask(cut) if cut.shared else None,
            use_cache=False,
        ).last_hidden_state
        rows = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(cut.sources)]
        weight, bias = self._base.output
        return token_scores(
            rows,
            weight,
            bias,
            torch.from_numpy(columns.token_ids[columns.positions(cut)]),
            torch.from_numpy(columns.temperatures[cut.samples]).to(accumulator(weight.dtype)),
            chunk=self._settings.logit_rows,
            entropy=True,
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
        columns: _Columns,
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
            inputs = _inputs(
                columns, columns.positions(cut)[chosen.numpy()], component, result.logprobs.dtype
            )
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


def _with_loss_tokens(samples: Sequence[Sample]) -> list[int]:
    return [index for index, sample in enumerate(samples) if sample.loss_mask.any()]


def _empty_sums(samples: Sequence[Sample], components: Sequence[Component]) -> dict[str, tuple[float, float]]:
    return {
        component.name: (0.0, float(sum(s.loss_tokens for s in samples if s.has(component))))
        for component in components
    }


def _inputs(
    columns: _Columns, positions: NDArray[np.int64], component: Component, dtype: torch.dtype
) -> TokenInputs:
    def gather(column: Array) -> Tensor:
        return torch.from_numpy(column[positions]).to(dtype)

    if isinstance(component.loss, CrossEntropy):
        return TokenInputs(None, None, gather(columns.weights))
    return TokenInputs(gather(columns.behavior_logprobs), gather(columns.advantages), None)


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
