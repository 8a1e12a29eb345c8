"""Who computes what: micro-batches of a request dealt to the ranks of a group, as a pure function of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from opentinker_trainer.domain.plan import MicroBatch, PlanSettings, plan
from opentinker_trainer.domain.samples import Sample


@dataclass(frozen=True, slots=True)
class Round:
    """Micro-batches that run side by side, one on each rank as far as there are enough."""

    batches: tuple[MicroBatch, ...]

    @property
    def tokens(self) -> int:
        """Columns that go through the model on the rank that has most."""
        return max(batch.tokens for batch in self.batches)

    @property
    def smallest(self) -> MicroBatch:
        """The micro-batch that costs least, for ranks that only keep in step."""
        return min(self.batches, key=lambda batch: batch.tokens)

    def of(self, rank: int) -> MicroBatch | None:
        """What a rank runs, if anything."""
        return self.batches[rank] if rank < len(self.batches) else None


def plan_for(
    samples: Sequence[Sample], wanted: Sequence[int], settings: PlanSettings, ranks: int
) -> list[MicroBatch]:
    """The plan for a group: micro-batches of fewer rows where there would not be one for each rank."""
    batches = plan(samples, wanted, settings)
    rows = sum(len(batch.rows) for batch in batches)
    if len(batches) < ranks and rows > len(batches):
        return plan(samples, wanted, replace(settings, max_rows=math.ceil(rows / ranks)))
    return batches


def deal(batches: Sequence[MicroBatch], ranks: int) -> list[Round]:
    """Deal micro-batches in their order, longest rows first, so that those of a round cost about the same."""
    return [Round(tuple(batches[at : at + ranks])) for at in range(0, len(batches), ranks)]
