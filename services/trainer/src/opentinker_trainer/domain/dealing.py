"""Who computes what: micro-batches of a request dealt to ranks and lanes, as a pure function of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentinker_trainer.domain.plan import MicroBatch


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


@dataclass(frozen=True, slots=True)
class Turn:
    """Rounds that a rank runs at once, one in each of its lanes; a single one has all its threads."""

    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        """Columns that go through the model on the rank that has most."""
        return sum(round_.tokens for round_ in self.rounds)


def deal(batches: Sequence[MicroBatch], ranks: int) -> list[Round]:
    """Deal micro-batches in their order, longest rows first, so that those of a round cost about the same."""
    return [Round(tuple(batches[at : at + ranks])) for at in range(0, len(batches), ranks)]


def turns(rounds: Sequence[Round], lanes: int) -> list[Turn]:
    """As many rounds a turn as there are lanes. What is left over, and images, go one by one."""
    found: list[Turn] = []
    open_rounds: list[Round] = []
    for round_ in rounds:
        if lanes == 1 or any(batch.images for batch in round_.batches):
            found += [*(Turn((each,)) for each in open_rounds), Turn((round_,))]
            open_rounds = []
            continue
        open_rounds.append(round_)
        if len(open_rounds) == lanes:
            found.append(Turn(tuple(open_rounds)))
            open_rounds = []
    return [*found, *(Turn((each,)) for each in open_rounds)]
