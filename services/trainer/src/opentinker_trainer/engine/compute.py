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

from opentinker_trainer.domain.losses import Component
from opentinker_trainer.domain.plan import PlanSettings, layout, plan
from opentinker_trainer.domain.samples import Sample
from opentinker_trainer.engine.base_model import BaseModel
from opentinker_trainer.engine.columns import Array, Columns
from opentinker_trainer.engine.logprobs import TokenScores
from opentinker_trainer.engine.losses import Metrics
from opentinker_trainer.engine.objective import (
    BackwardOutput,
    SampleScores,
    add_losses,
    add_metric,
    empty_sums,
    summarize,
)
from opentinker_trainer.engine.policy import Gradient
from opentinker_trainer.engine.scoring import Scorer


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """Launch settings of the passes."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    logit_rows: int = 256
    """How many rows of logits [logit_rows, V] exist at a time."""


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
        self.entropy[positions] = result.entropy.float().numpy()

    def by_sample(self, columns: Columns, skipped: frozenset[int]) -> list[SampleScores]:
        pairs = zip(columns.split(self.logprobs), columns.split(self.entropy), strict=True)
        return [
            SampleScores(logprobs, entropy, index in skipped)
            for index, (logprobs, entropy) in enumerate(pairs)
        ]


class Compute:
    """Runs passes of whatever adapter is active in the model."""

    def __init__(self, base: BaseModel, settings: ComputeSettings) -> None:
        self._scorer = Scorer(base, settings.logit_rows)
        share = settings.plan.share_prefix and base.full_attention
        self._plan = PlanSettings(
            settings.plan.token_budget, settings.plan.max_rows, share, settings.plan.max_shared_row_tokens
        )

    def forward(self, samples: Sequence[Sample]) -> ForwardOutput:
        """Logprobs and entropy at the loss tokens of each sample, without gradients."""
        columns = Columns.of(samples)
        scores = _Scores.empty(columns)
        metrics: Metrics = {}
        with torch.no_grad():
            for batch in plan(samples, _with_loss_tokens(samples), self._plan):
                cut = layout(batch, samples)
                result = self._scorer.score(cut, columns)
                scores.put(columns.positions(cut), result)
                add_metric(metrics, "actor/entropy", float(result.entropy.double().sum()), len(cut.tokens))
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
        columns = Columns.of(samples)
        scores = _Scores.empty(columns)
        # A deferred component is there even where nothing contributes: OptimStep carries its denominator.
        gradients: dict[str, Gradient] = {c.name: {} for c in components if c.denominator is None}
        output = BackwardOutput(empty_sums(samples, components), gradients, [], {}, 0)
        for batch in plan(samples, wanted, self._plan):
            cut = layout(batch, samples)
            result = self._scorer.score(cut, columns)
            add_losses(cut, samples, columns, components, result, parameters, output)
            scores.put(columns.positions(cut), result)
            output.trained_tokens += len(cut.tokens)
        output.scores = scores.by_sample(columns, frozenset(trainable) - frozenset(wanted))
        summarize(output, samples, components)
        return output


def _with_loss_tokens(samples: Sequence[Sample]) -> list[int]:
    return [index for index, sample in enumerate(samples) if sample.loss_mask.any()]
