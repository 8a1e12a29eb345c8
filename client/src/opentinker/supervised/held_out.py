"""How well a policy predicts rows it never learns from: the training loss without a gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opentinker.supervised.encoding import Example
from opentinker.training.operations import Operation
from opentinker.training.policy import Policy
from opentinker.training.results import ForwardResult

TOKENS_A_CALL = 16_384
"""About how much one Forward takes: other operations get their turn in between."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The loss on held-out rows: sum of -weight * logprob over loss tokens, divided by their number."""

    loss: float
    perplexity: float
    """exp of the mean -logprob, weights left aside."""
    rows: int
    tokens: int
    """Loss tokens."""
    seconds: float
    """Time inside the trainer's engine; what it waited there for steps before it is not in it."""

    @property
    def summary(self) -> str:
        """In a few words."""
        return f"held-out loss {self.loss:.4f}, perplexity {self.perplexity:.3f} over {self.rows} rows"

    def metrics(self) -> dict[str, float]:
        """As metrics."""
        return {
            "val/loss": self.loss,
            "val/perplexity": self.perplexity,
            "val/rows": float(self.rows),
            "val/loss_tokens": float(self.tokens),
            "timing_s/testing": self.seconds,
        }


class Measurement:
    """A measurement that has been started at a policy's current step; `result()` waits for it."""

    def __init__(self, policy: Policy, examples: Sequence[Example]) -> None:
        self._parts: list[tuple[Sequence[Example], Operation[ForwardResult]]] = [
            (part, policy.forward([example.sample() for example in part])) for part in _parts(examples)
        ]

    async def result(self) -> HeldOut:
        """The loss over all rows, summed in float64."""
        weighted = plain = seconds = 0.0
        rows = tokens = 0
        for part, operation in self._parts:
            found = await operation
            seconds += found.engine_seconds
            for example, logprobs in zip(part, found.logprobs, strict=True):
                assert logprobs is not None
                mask = example.weights != 0
                values = np.asarray(logprobs, dtype=np.float64)[mask]
                weighted -= float(values @ example.weights[mask].astype(np.float64))
                plain -= float(values.sum())
                rows += 1
                tokens += int(mask.sum())
        mean = plain / tokens
        return HeldOut(
            loss=weighted / tokens,
            # A model that is certain of something else has a perplexity beyond every float.
            perplexity=math.exp(mean) if mean < 700 else math.inf,
            rows=rows,
            tokens=tokens,
            seconds=seconds,
        )


def _parts(examples: Sequence[Example]) -> list[Sequence[Example]]:
    """Consecutive rows, about `TOKENS_A_CALL` tokens each."""
    parts: list[list[Example]] = [[]]
    room = TOKENS_A_CALL
    for example in examples:
        if parts[-1] and len(example.token_ids) > room:
            parts.append([])
            room = TOKENS_A_CALL
        parts[-1].append(example)
        room -= len(example.token_ids)
    return [part for part in parts if part]
