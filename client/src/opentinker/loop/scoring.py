"""What a batch's rows are worth to other models, before the first update on them: the trainer's own logprobs,
the reference's, the critic's values. All are Forwards of the trainer, under way at once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from opentinker import errors
from opentinker.loop.algorithms import Critic, KLPenalty
from opentinker.training import kl
from opentinker.training.policy import Policy
from opentinker.training.samples import TrainSample

Rows = Sequence[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Scores:
    """Arrays [n] a row; None where nobody asked."""

    proximal: Rows | None = None
    reference: Rows | None = None
    values: Rows | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """As metrics."""

    def attach(self, rows: Sequence[TrainSample]) -> list[TrainSample]:
        """The rows with what was scored."""
        nobody: list[None] = [None] * len(rows)
        return [
            replace(row, proximal_logprobs=proximal, reference_logprobs=reference)
            for row, proximal, reference in zip(
                rows, self.proximal or nobody, self.reference or nobody, strict=True
            )
        ]


async def score(
    policy: Policy,
    rows: Sequence[TrainSample],
    *,
    proximal: bool = False,
    penalty: KLPenalty | None = None,
    critic: Critic | None = None,
    critic_policy: Policy | None = None,
) -> Scores:
    """One Forward for each model that is asked; a shared critic's values come with the policy's logprobs."""
    started = time.monotonic()
    shared = critic is not None and critic.shared
    own = policy.forward(rows, values=shared) if proximal or shared else None
    reference = None
    if penalty is not None:
        reference = (
            policy.forward(rows, base_model=True)
            if penalty.reference is None
            else penalty.reference.forward(rows)
        )
    valued = critic_policy.forward(rows, values=True) if critic_policy is not None else own
    engine = 0.0
    found: dict[str, Rows] = {}
    for name, operation, field_name in (
        ("proximal", own if proximal else None, "logprobs"),
        ("reference", reference, "logprobs"),
        ("values", valued if critic is not None else None, "values"),
    ):
        if operation is not None:
            result = await operation
            found[name] = _complete(getattr(result, field_name), rows)
            if not (name == "values" and valued is own and proximal):
                engine += result.engine_seconds
    if not found:
        return Scores()
    seconds = {"timing_s/score": time.monotonic() - started, "timing_s/engine_score": engine}
    return Scores(seconds=seconds, **found)


def divergence(penalty: KLPenalty, rows: Sequence[TrainSample], scores: Scores) -> list[NDArray[np.float64]]:
    """The estimate of KL(policy || reference) at each token of each row, [n], 0 where none is trained on.

    Of the trainer's logprobs where it scored the batch, otherwise of the sampler's.
    """
    assert scores.reference is not None
    result = []
    for index, row in enumerate(rows):
        mask = np.asarray(row.loss_mask, dtype=bool)
        own = scores.proximal[index] if scores.proximal is not None else row.logprobs
        assert own is not None, "rows of trajectories have the sampler's logprobs"
        estimate = kl.estimate(
            penalty.chosen, np.asarray(own, dtype=np.float64), np.asarray(scores.reference[index])
        )
        result.append(np.where(mask, estimate, 0.0))
    return result


def _complete(arrays: Sequence[NDArray[np.float32] | None], rows: Sequence[TrainSample]) -> Rows:
    """One array for every row, of its length."""
    complete = [array for array in arrays if array is not None]
    if len(complete) != len(rows) or any(
        len(array) != len(row.token_ids) for array, row in zip(complete, rows, strict=True)
    ):
        raise errors.InternalError("a Forward did not give one number a token", reason=errors.Reason.INTERNAL)
    return complete
