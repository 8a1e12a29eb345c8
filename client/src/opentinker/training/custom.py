"""Losses that the trainer does not know: any function C of the logprobs, in two passes.

First a Forward gives the logprobs; the user's function says what C is there and how it changes with each
logprob; then cross-entropy with the weights -dC/dlogp carries that back: its gradient, the sum of dC/dlogp
times the gradient of each logprob, is that of C, exactly, for C couples tokens and rows through the logprobs
only.

    def preference(logprobs):                        # DPO on pairs of rows, with known reference logprobs
        margin = beta * ((logprobs[0].sum() - ref[0]) - (logprobs[1].sum() - ref[1]))
        slope = -beta / (1 + np.exp(margin))         # dC/dmargin * beta, C = log(1 + exp(-margin))
        return np.log1p(np.exp(-margin)), [slope * mask[0], -slope * mask[1]]

    await policy.forward_backward_custom(rows, preference)
    await policy.optim_step(ot.AdamW())

Where the user's process has a library that differentiates, the function may use it; with torch:

    def with_torch(logprobs):
        leaves = [torch.tensor(row, requires_grad=True) for row in logprobs]
        loss = my_loss(leaves)
        return loss.item(), [g.numpy() for g in torch.autograd.grad(loss, leaves)]
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinker.errors import InvalidArgument, Reason, invalid
from opentinker.training.results import ForwardBackwardResult, ForwardResult, Sum
from opentinker.training.samples import TrainSample

COMPONENT = "custom"

CustomLoss = Callable[[list[NDArray[np.float64]]], tuple[float, Sequence[Any]]]
"""From the logprobs of each row, [n] with 0 at tokens that are not trained on, to the loss and dC/dlogp, one
array [n] a row.
"""


@dataclass(frozen=True, slots=True)
class CustomResult(ForwardBackwardResult):
    """What was added to the gradient, and the loss that the function gave."""

    loss: float = 0.0


def apply(
    samples: Sequence[TrainSample], scored: ForwardResult, function: CustomLoss
) -> tuple[float, list[TrainSample]]:
    """Call the function; its loss and the rows of the second pass.

    InvalidArgument on a loss or gradient that is not finite, has another shape than the logprobs, or is not 0
    at a token that is not trained on: nothing has been added to the gradient then.
    """
    masks = [np.asarray(row.loss_mask, dtype=bool) for row in samples]
    logprobs = [
        np.where(mask, np.asarray(row, dtype=np.float64), 0.0)
        for row, mask in zip(scored.logprobs, masks, strict=True)
        if row is not None
    ]
    loss, gradients = function([row.copy() for row in logprobs])
    if not math.isfinite(loss):
        raise invalid("loss", f"the custom loss is {loss}")
    if len(gradients) != len(samples):
        raise invalid("gradients", f"the custom loss gave {len(gradients)} gradients for {len(samples)} rows")
    rows = []
    for index, (row, given, mask) in enumerate(zip(samples, gradients, masks, strict=True)):
        slope = np.asarray(given, dtype=np.float64)
        if slope.shape != mask.shape:
            raise _bad(index, f"has shape {slope.shape} for {len(mask)} tokens")
        if not np.isfinite(slope).all():
            raise _bad(index, "is not finite")
        if slope[~mask].any():
            raise _bad(index, "is not 0 at a token that is not trained on")
        rows.append(replace(row, weights=(-slope).astype(np.float32), components=()))
    return float(loss), rows


def result(loss: float, done: ForwardBackwardResult, forward: ForwardResult) -> CustomResult:
    """Of both passes. The sum that the trainer saw is linear in the logprobs and says nothing: the loss
    itself takes its place.
    """
    return CustomResult(
        logprobs=forward.logprobs,
        metrics={name: value for name, value in done.metrics.items() if not name.startswith("loss/")},
        engine_seconds=forward.engine_seconds + done.engine_seconds,
        components={COMPONENT: Sum(loss, 1.0)},
        trained_tokens=done.trained_tokens,
        loss=loss,
    )


def _bad(index: int, problem: str) -> InvalidArgument:
    return InvalidArgument(
        f"gradients[{index}] of the custom loss {problem}",
        reason=Reason.INVALID_FIELD,
        field=f"gradients[{index}]",
    )
