"""Forward and backward passes over a request: sums of losses, gradients and per-token results.

Every sum runs over loss tokens; denominators come with the components. So any cut into micro-batches gives
the same loss, gradient and metrics up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opentinker_trainer.domain.dealing import deal, turns
from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.plan import Layout, PlanSettings, layout, plan, slices
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Array, Columns
from opentinker_trainer.engine.lanes import Lanes
from opentinker_trainer.engine.logprobs import TokenScores
from opentinker_trainer.engine.model_view import ModelView
from opentinker_trainer.engine.objective import (
    BackwardOutput,
    Metrics,
    SampleScores,
    add_losses,
    add_metric,
    add_part,
    add_ranks,
    empty_part,
    empty_sums,
    merge_metrics,
    needs_entropy_gradient,
    summarize,
    take_part,
)
from opentinker_trainer.engine.packing import enable
from opentinker_trainer.engine.policy import Gradient
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.scoring import Scorer


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Launch settings of the passes."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    logit_rows: int = 256
    """How many rows of logits [logit_rows, V] exist at a time."""
    slice_tokens: int = 1024
    """Tokens of a slice (padding included); micro-batches that run at once are never parted."""
    lanes: int = 1
    """Micro-batches that run at once, where gradients are small enough to have several."""


@dataclass(slots=True)
class ForwardOutput:
    """What a Forward computed."""

    scores: list[SampleScores]
    metrics: Metrics


PartT = TypeVar("PartT")


class _TokenArrays(NamedTuple):
    """Scores of the loss tokens of a micro-batch, [N]."""

    logprobs: Array
    entropy: Array
    values: Array | None

    @classmethod
    def of(cls, scores: TokenScores) -> "_TokenArrays":
        values = None if scores.values is None else _array(scores.values)
        return cls(_array(scores.logprobs), _array(scores.entropy), values)


@dataclass(slots=True)
class _Scores:
    """Per-token results of all samples end to end, [T]."""

    logprobs: Array
    entropy: Array
    values: Array | None

    @classmethod
    def empty(cls, columns: Columns, *, values: bool) -> "_Scores":
        logprobs, entropy, value = (np.zeros(columns.starts[-1], np.float32) for _ in range(3))
        return cls(logprobs, entropy, value if values else None)

    def put(self, positions: NDArray[np.int64], result: _TokenArrays) -> None:
        self.logprobs[positions] = result.logprobs
        self.entropy[positions] = result.entropy
        if self.values is not None and result.values is not None:
            self.values[positions] = result.values

    def add_ranks(self, ranks: Ranks) -> None:
        """Take over what other ranks computed."""
        arrays = [self.logprobs, self.entropy]
        ranks.sum_arrays(arrays if self.values is None else [*arrays, self.values])

    def by_sample(self, columns: Columns, skipped: frozenset[int]) -> list[SampleScores]:
        logprobs, entropy = columns.split(self.logprobs), columns.split(self.entropy)
        values = [None] * len(logprobs) if self.values is None else columns.split(self.values)
        return [
            SampleScores(*of_sample, index in skipped)
            for index, of_sample in enumerate(zip(logprobs, entropy, values, strict=True))
        ]


class _Pass(Generic[PartT]):
    """A pass over a request, slice by slice.

    Which micro-batches there are, which of them run at once, and in which order their parts are added up,
    follows from request and launch settings, so that what runs between two slices cannot change a bit. Over
    several ranks every rank makes the same plan and runs its share of each slice.
    """

    def __init__(
        self,
        scorer: Scorer,
        view: ModelView,
        ranks: Ranks,
        lanes: Lanes,
        samples: Sequence[Sample],
        wanted: Sequence[int],
        settings: ComputeSettings,
    ) -> None:
        self._scorer = scorer
        self._view = view
        self._ranks = ranks
        self._lanes = lanes
        self._samples = samples
        self._columns = Columns.of(samples)
        self._scores = _Scores.empty(self._columns, values=view.value_head is not None)
        count = lanes.count if view.side_by_side else 1
        rounds = deal(plan(samples, wanted, settings.plan, ranks.count * count), ranks.count)
        self._slices = slices(turns(rounds, count), settings.slice_tokens)
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
        for turn in self._slices[self._next] if self._slices else ():
            batches = [round_.of(self._ranks.rank) for round_ in turn.rounds]
            cuts = [layout(batch, self._samples) for batch in batches if batch is not None]
            works: list[Callable[[], PartT]] = [partial(self._run, cut) for cut in cuts]
            for cut, part in zip(cuts, self._lanes.run(works), strict=True):
                self._add(cut, part)
            if not cuts and self._view.in_step:
                self._keep_in_step(layout(turn.rounds[0].smallest, self._samples))
        self._next += 1

    def _run(self, cut: Layout) -> PartT:
        """Compute a micro-batch; several run at once, so nothing of the pass is written to."""
        raise NotImplementedError

    def _add(self, cut: Layout, part: PartT) -> None:
        raise NotImplementedError

    def _keep_in_step(self, cut: Layout) -> None:
        """Make the collective calls of a micro-batch; what comes out is not used."""
        raise NotImplementedError


class ForwardPass(_Pass[tuple[_TokenArrays, float]]):
    """Logprobs and entropy at the loss tokens of each sample, without gradients."""

    def __init__(
        self,
        scorer: Scorer,
        view: ModelView,
        ranks: Ranks,
        lanes: Lanes,
        samples: Sequence[Sample],
        settings: ComputeSettings,
    ) -> None:
        super().__init__(scorer, view, ranks, lanes, samples, _with_loss_tokens(samples), settings)
        self._metrics: Metrics = {}

    def _keep_in_step(self, cut: Layout) -> None:
        with torch.no_grad():
            self._scorer.score(self._view, cut, self._columns)

    def _run(self, cut: Layout) -> tuple[_TokenArrays, float]:
        with torch.no_grad():
            result = self._scorer.score(self._view, cut, self._columns)
        return _TokenArrays.of(result), float(result.entropy.double().sum())

    def _add(self, cut: Layout, part: tuple[_TokenArrays, float]) -> None:
        scores, entropy = part
        self._scores.put(self._columns.positions(cut), scores)
        add_metric(self._metrics, "actor/entropy", entropy, len(cut.tokens))

    def finish(self) -> ForwardOutput:
        """The result, once every slice has run."""
        self._scores.add_ranks(self._ranks)
        metrics = merge_metrics(self._ranks.gather(self._metrics))
        return ForwardOutput(self._scores.by_sample(self._columns, frozenset()), metrics)


class BackwardPass(_Pass[tuple[_TokenArrays, BackwardOutput]]):
    """Losses, and the gradient of coefficient * sum / denominator with respect to what the policy trains.

    The gradient is the pass's own until somebody takes it from the output. With `skip_inert` rows that cannot
    contribute are left out: their losses are 0 and still count as loss tokens, their logprobs are not
    computed.
    """

    def __init__(
        self,
        scorer: Scorer,
        view: ModelView,
        ranks: Ranks,
        lanes: Lanes,
        samples: Sequence[Sample],
        components: Sequence[Component],
        settings: ComputeSettings,
        *,
        skip_inert: bool,
    ) -> None:
        trainable = _with_loss_tokens(samples)
        wanted = trainable
        if skip_inert:
            wanted = [index for index in trainable if not samples[index].is_inert(components)]
        super().__init__(scorer, view, ranks, lanes, samples, wanted, settings)
        self._components = components
        self._skipped = frozenset(trainable) - frozenset(wanted)
        # A deferred component is there even where nothing contributes: OptimStep carries its denominator.
        gradients: dict[str, Gradient] = {c.name: {} for c in components if c.denominator is None}
        self._output = BackwardOutput(empty_sums(samples, components), gradients, [], {}, 0)

    def _score(self, cut: Layout) -> TokenScores:
        return self._scorer.score(
            self._view,
            cut,
            self._columns,
            entropy_gradient=needs_entropy_gradient(self._components),
        )

    def _keep_in_step(self, cut: Layout) -> None:
        take_part(self._components, self._score(cut), self._view, self._output)

    def _run(self, cut: Layout) -> tuple[_TokenArrays, BackwardOutput]:
        result = self._score(cut)
        # Large gradients go straight into the pass's own: nothing runs beside them.
        gradients = {} if self._view.side_by_side else self._output.gradients
        part = empty_part(self._components, gradients)
        add_losses(cut, self._samples, self._columns, self._components, result, self._view, part)
        part.trained_tokens = len(cut.tokens)
        return _TokenArrays.of(result), part

    def _add(self, cut: Layout, part: tuple[_TokenArrays, BackwardOutput]) -> None:
        scores, sums = part
        self._scores.put(self._columns.positions(cut), scores)
        add_part(sums, self._output)

    def finish(self) -> BackwardOutput:
        """The result, once every slice has run."""
        self._view.reduce(self._output.gradients, self._ranks)
        self._scores.add_ranks(self._ranks)
        add_ranks(self._output, self._ranks)
        self._output.scores = self._scores.by_sample(self._columns, self._skipped)
        summarize(self._output, self._samples, self._components)
        return self._output


class Compute:
    """Begins passes; their slices run while the view's policy is active."""

    def __init__(self, base: BaseModel, ranks: Ranks, settings: ComputeSettings, threads: int) -> None:
        self._ranks = ranks
        self._lanes = Lanes(settings.lanes, threads)
        self._scorer = Scorer(base, settings.logit_rows)
        self._settings = replace(settings, plan=_fitting(settings.plan, base))

    def begin_forward(self, view: ModelView, samples: Sequence[Sample]) -> ForwardPass:
        """A Forward of which no slice has run."""
        return ForwardPass(self._scorer, view, self._ranks, self._lanes, samples, self._settings)

    def begin_forward_backward(
        self,
        view: ModelView,
        samples: Sequence[Sample],
        components: Sequence[Component],
        *,
        skip_inert: bool,
    ) -> BackwardPass:
        """A ForwardBackward of which no slice has run."""
        return BackwardPass(
            self._scorer,
            view,
            self._ranks,
            self._lanes,
            samples,
            components,
            self._settings,
            skip_inert=skip_inert,
        )


def _array(scores: Tensor) -> Array:
    array: Array = scores.detach().float().cpu().numpy()
    return array


def _fitting(wanted: PlanSettings, base: BaseModel) -> PlanSettings:
    """The plan's settings without what the model cannot do (the rule of `domain.plan`)."""
    if not base.full_attention:
        return replace(wanted, share_prefix=False, pack=False)
    return replace(wanted, pack=wanted.pack and enable(base.model, base.decoder))


def _with_loss_tokens(samples: Sequence[Sample]) -> list[int]:
    return [index for index, sample in enumerate(samples) if sample.loss_mask.any()]
