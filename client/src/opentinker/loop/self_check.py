"""Do trainer and sampler mean the same model? Asked once, before the first update, on the job's own tokens.

Every ratio of a policy loss compares the two. Where they differ by more than rounding, something is wrong
that no metric shows: a temperature applied on one side, an adapter that was not loaded, another template.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opentinker import errors
from opentinker.connection.calls import answer
from opentinker.connection.jobs import Link, Role
from opentinker.training.policy import Policy
from opentinker.training.samples import TrainSample
from opentinkerapi.trainer.v1 import trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

ROWS = 16
"""How many rows are compared, spread over the batch."""

FLOAT32_BOUND = 1e-3
BFLOAT16_BOUND = 0.08
"""Mean absolute difference of logprobs that rounding explains."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The mean absolute difference over `tokens` sampled tokens, and what it may be."""

    difference: float
    bound: float
    tokens: int
    precision: str

    def metrics(self) -> dict[str, float]:
        """For the first step's row."""
        return {
            "rollout_corr/check_abs_diff": self.difference,
            "rollout_corr/check_bound": self.bound,
            "rollout_corr/check_tokens": float(self.tokens),
        }


def chosen(rows: Sequence[TrainSample]) -> list[int]:
    """The rows to compare: all of a small batch, otherwise some from all over it."""
    count = min(ROWS, len(rows))
    return sorted({int(index) for index in np.linspace(0, len(rows) - 1, count)})


async def check(
    policy: Policy,
    rows: Sequence[TrainSample],
    *,
    bound: float | None,
    scored: Sequence[NDArray[np.float32]] | None = None,
) -> Comparison:
    """Compare, and refuse to train with LogprobMismatch above the bound (None: what the engines' precision
    explains). `scored` are the trainer's logprobs of all rows, where they are known already.
    """
    if scored is None:
        indices = chosen(rows)
        rows = [rows[index] for index in indices]
        scored = [array for array in (await policy.forward(rows)).logprobs if array is not None]
    gaps = []
    for row, own in zip(rows, scored, strict=True):
        mask = np.asarray(row.loss_mask, dtype=bool)
        gaps.append(np.asarray(own, dtype=np.float64)[mask] - np.asarray(row.logprobs)[mask])
    gap = np.concatenate(gaps)
    precision = await _precision(policy)
    allowed = bound if bound is not None else _bound(precision)
    found = Comparison(float(np.abs(gap).mean()), allowed, len(gap), precision)
    # Also where it is not a number.
    if not found.difference <= allowed:
        raise errors.LogprobMismatch(_explain(found, rows), reason=None)
    return found


async def _precision(policy: Policy) -> str:
    async def ask(link: Link) -> trainer_service_pb2.GetCapabilitiesResponse:
        request = trainer_service_pb2.GetCapabilitiesRequest()
        return await answer(TrainerServiceStub(link.channel).GetCapabilities(request))

    trainer = (await policy.job.through(Role.TRAINER, ask)).forward_dtype
    sampler = (await policy.sampler.capabilities()).dtype
    return f"trainer {trainer or 'unknown'}, sampler {sampler or 'unknown'}"


def _bound(precision: str) -> float:
    return FLOAT32_BOUND if precision.count("float32") == 2 else BFLOAT16_BOUND


def _explain(found: Comparison, rows: Sequence[TrainSample]) -> str:
    temperatures = sorted({row.temperature for row in rows})
    versions = sorted({version for row in rows for _, _, version in row.spans})
    return (
        f"trainer and sampler differ by {found.difference:.4g} in the mean logprob of {found.tokens} tokens "
        f"that the sampler drew, more than {found.bound:g}; nothing was trained. Likely causes: the "
        f"temperature ({', '.join(f'{each:g}' for each in temperatures)}) or top_p, top_k are applied on one "
        f"side only; precision ({found.precision}); a stale or missing adapter (version "
        f"{', '.join(map(str, versions)) or 'unknown'}); another chat template or tokenizer. If the "
        "difference is expected, give fit(logprob_check=<bound>)"
    )
