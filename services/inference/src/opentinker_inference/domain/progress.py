"""What is known of a completion before it has finished, for those who read along."""

from dataclasses import dataclass, field

from opentinker_inference.domain.sampling import Completion, Delta

MAX_DELTA_ENTRIES = 2**16
"""Tokens, times what is said of each, in one delta: far below what a message holds."""


@dataclass(slots=True)
class Progress:
    """Tokens of one completion so far. Grows by what the engine says; readers take slices, each at its pace.

    An engine that died samples again. Where it then samples other tokens (only the deterministic one promises
    the same), what was known is replaced from there on, and `rewritten` tells readers that what they were
    given is void.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_logprobs: list[tuple[float, ...]] = field(default_factory=list)
    rewritten: int = 0
    completion: Completion | None = None
    """Set when it has finished; it then is the truth."""

    def add(self, delta: Delta) -> None:
        """Take in what was sampled."""
        known = len(self.token_ids) - delta.start
        assert known >= 0, "a delta left tokens out"
        ids = list(delta.token_ids[:known])
        if self.token_ids[delta.start :][: len(ids)] != ids:
            self.rewritten += 1
            self._keep(delta.start)
            known = 0
        self.token_ids += delta.token_ids[known:]
        self.logprobs += delta.logprobs[known:]
        self.top_ids += delta.top_ids[known:]
        self.top_logprobs += delta.top_logprobs[known:]

    def finish(self, completion: Completion) -> None:
        """The whole is there, which takes the place of the parts."""
        if list(completion.token_ids[: len(self.token_ids)]) != self.token_ids:
            self.rewritten += 1
        self.completion = completion
        self._keep(0)

    def part(self, index: int, start: int) -> Delta | None:
        """What there is from token `start` on, as far as one message holds it; None if there is nothing."""
        whole = self.completion or self
        if start >= len(whole.token_ids):
            return None
        step = MAX_DELTA_ENTRIES // (1 + (len(whole.top_ids[0]) if whole.top_ids else 0))
        cut = slice(start, start + step)
        return Delta(
            index,
            start,
            tuple(whole.token_ids[cut]),
            tuple(whole.logprobs[cut]),
            tuple(whole.top_ids[cut]),
            tuple(whole.top_logprobs[cut]),
        )

    def _keep(self, count: int) -> None:
        del self.token_ids[count:]
        del self.logprobs[count:]
        del self.top_ids[count:]
        del self.top_logprobs[count:]
