"""What was sampled here so far, in numbers that only grow."""

from collections import Counter
from dataclasses import dataclass, field

from opentinker_inference.domain.requests import SampleCall


@dataclass(slots=True)
class Tally:
    """Since the server started."""

    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    scored_tokens: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """Sample requests that ended, by OK or the reason why not."""

    def ended(self, call: SampleCall, before: int) -> None:
        """A request ended that had `before` finished completions when it began."""
        new = call.completions[before:]
        self.sampled_tokens += sum(len(completion.token_ids) for completion in new)
        self.prompt_tokens += len(call.spec.prompt)
        self.cached_prompt_tokens += call.cached_prompt_tokens
        self.requests["OK" if call.error is None else str(call.error.reason)] += 1
