"""Forward and backward passes over a request: sums of losses, gradients and per-token results.

Every sum runs over loss tokens; denominators come with the components. So any cut into micro-batches gives
the same loss, gradient and metrics up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.plan import MicroBatch, PlanSettings, layout, plan, slices
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Array, Columns
from opentinker_trainer.engine.logprobs import TokenScores
from opentinker_trainer.engine.objective import (
    BackwardOutput,
    Metrics,
    SampleScores,
    add_losses,
    add_metric,
    empty_sums,
    needs_entropy_gradient,
    summarize,
)
from opentinker_trainer.engine.packing import enable
from opentinker_trainer.engine.policy import Gradient
from opentinker_trainer.engine.scoring import Scorer


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Launch settings of the passes."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    logit_rows: int = 256
    """How many rows of logits [logit_rows, V] exist at a time."""
    slice_tokens: int = 1024
    """Tokens of a slice (padding included); a micro-batch is never cut."""


@dataclass(slots=True)
class ForwardOutput:
    """What a Forward computed."""

    scores: list[SampleScores]
    metrics: Metrics


@dataclass(slots=True)
class _Scores:
    """Per-token results of all samples end to end, [T]."""

    logprobs: Array
    entropy: Array

    @classmethod
    def empty(cls, columns: Columns) -> "_Scores":
        return cls(np.zeros(columns.starts[-1], np.float32), np.zeros(columns.starts[-1], np.float32))

    def put(self, positions: NDArray[np.int64], result: TokenScores) -> None:
        self.logprobs[positions] = result.logprobs.detach().float().numpy()
        self.entropy[positions] = result.entropy.detach().float().numpy()

    def by_sample(self, columns: Columns, skipped: frozenset[int]) -> list[SampleScores]:
        pairs = zip(columns.split(self.logprobs), columns.split(self.entropy), strict=True)
        return [
            SampleScores(logprobs, entropy, index in skipped)
            for index, (logprobs, entropy) in enumerate(pairs)
        ]


class _Pass:
    """A pass over a request, slice by slice.

    Which micro-batches there are, and in which order they run, follows from request and launch settings, so
    that what runs between two slices cannot change a bit.
    """

    def __init__(
        self, scorer: Scorer, samples: Sequence[Sample], wanted: Sequence[int], settings: ComputeSettings
    ) -> None:
        self._scorer = scorer
        self._samples = samples
        self._columns = Columns.of(samples)
        self._scores = _Scores.empty(self._columns)
        self._slices = slices(plan(samples, wanted, settings.plan), settings.slice_tokens)
        self._next = 0

    @property
    def slices(self) -> int:
        """How many slices the pass takes, at least one."""
        return max(1, len(self._slices))

    @property
    def ended(self) -> bool:
        """Whether every slice has run."""
        return self._next >= self.slices

    def run_slice(self) -> None:
        """Run the next slice."""
        for batch in self._slices[self._next] if self._slices else ():
            self._run(batch)
        self._next += 1

    def _run(self, batch: MicroBatch) -> None:
        raise NotImplementedError


class ForwardPass(_Pass):
    """Logprobs and entropy at the loss tokens of each sample, without gradients."""

    def __init__(self, scorer: Scorer, samples: Sequence[Sample], settings: ComputeSettings) -> None:
        super().__init__(scorer, samples, _with_loss_tokens(samples), settings)
        self._metrics: Metrics = {}

    def _run(self, batch: MicroBatch) -> None:
        cut = layout(batch, self._samples)
        with torch.no_grad():
            result = self._scorer.score(cut, self._columns)
        self._scores.put(self._columns.positions(cut), result)
        add_metric(self._metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))

    def finish(self) -> ForwardOutput:
        """The result, once every slice has run."""
        return ForwardOutput(self._scores.by_sample(self._columns, frozenset()), self._metrics)


class BackwardPass(_Pass):
    """Losses, and the gradient of coefficient * sum / denominator with respect to `parameters`.

    The gradient is the pass's own until somebody takes it from the output. With `skip_inert` rows that cannot
    contribute are left out: their losses are 0 and still count as loss tokens, their logprobs are not
    computed.
    """

    def __init__(
        self,
        scorer: Scorer,
        samples: Sequence[Sample],
        components: Sequence[Component],
        parameters: dict[str, Tensor],
        settings: ComputeSettings,
        *,
        skip_inert: bool,
    ) -> None:
        trainable = _with_loss_tokens(samples)
        wanted = trainable
        if skip_inert:
            wanted = [index for index in trainable if not samples[index].is_inert(components)]
        super().__init__(scorer, samples, wanted, settings)
        self._components = components
        self._parameters = parameters
        self._skipped = frozenset(trainable) - frozenset(wanted)
        # A deferred component is there even where nothing contributes: OptimStep carries its denominator.
        gradients: dict[str, Gradient] = {c.name: {} for c in components if c.denominator is None}
        self._output = BackwardOutput(empty_sums(samples, components), gradients, [], {}, 0)

    def _run(self, batch: MicroBatch) -> None:
        cut = layout(batch, self._samples)
        result = self._scorer.score(
            cut, self._columns, entropy_gradient=needs_entropy_gradient(self._components)
        )
        add_losses(
            cut, self._samples, self._columns, self._components, result, self._parameters, self._output
        )
        self._scores.put(self._columns.positions(cut), result)
        self._output.trained_tokens += len(cut.tokens)

    def finish(self) -> BackwardOutput:
        """The result, once every slice has run."""
        self._output.scores = self._scores.by_sample(self._columns, self._skipped)
        summarize(self._output, self._samples, self._components)
        return self._output


class Compute:
    """Begins passes; their slices run with whatever adapter is active in the model then."""

    def __init__(self, base: BaseModel, settings: ComputeSettings) -> None:
        self._scorer = Scorer(base, settings.logit_rows)
        self._settings = replace(settings, plan=_fitting(settings.plan, base))

    def begin_forward(self, samples: Sequence[Sample]) -> ForwardPass:
        """A Forward of which no slice has run."""
        return ForwardPass(self._scorer, samples, self._settings)

    def begin_forward_backward(
        self,
        samples: Sequence[Sample],
        components: Sequence[Component],
        parameters: dict[str, Tensor],
        *,
        skip_inert: bool,
    ) -> BackwardPass:
        """A ForwardBackward of which no slice has run."""
        return BackwardPass(
            self._scorer, samples, components, parameters, self._settings, skip_inert=skip_inert
        )


def _fitting(wanted: PlanSettings, base: BaseModel) -> PlanSettings:
    """The plan's settings without what the model cannot do (the rule of `domain.plan`)."""
    if not base.full_attention:
        return replace(wanted, share_prefix=False, pack=False)
    return replace(wanted, pack=wanted.pack and enable(base.model, base.decoder))


def _with_loss_tokens(samples: Sequence[Sample]) -> list[int]:
    return [index for index, sample in enumerate(samples) if sample.loss_mask.any()]
