"""The token ids of a conversation while it is played."""

from collections.abc import Sequence

import numpy as np

from opentinker.rollout.trajectory import Segment
from opentinker.sampling.completion import Completion
from opentinker.sampling.prompt import Prompt, images_of
from opentinker.sampling.support import Support


class Tokens:
    """A segment that grows."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = list(prompt)
        self.images = list(images_of(prompt))
        self.mask = [0] * len(prompt)
        self.logprobs: list[float] = [0.0] * len(prompt)
        self.spans: list[tuple[int, int, int]] = []
        self.supports: list[tuple[int, Support]] = []

    def sampled(self, completion: Completion, version: int) -> None:
        """Append what the policy said."""
        start = len(self.ids)
        spans = completion.spans or ((0, len(completion.token_ids), version),)
        self.spans += [(start + first, start + last, number) for first, last, number in spans]
        if completion.support is not None:
            self.supports.append((start, completion.support))
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()

    def observed(self, ids: Sequence[int]) -> None:
        """Append what the environment said."""
        self.images += [image.shifted(len(self.ids)) for image in images_of(ids)]
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def prompt(self) -> Prompt:
        """All of it so far, to be continued."""
        return Prompt(self.ids, self.images)

    def freeze(self) -> Segment:
        """Cut off what nobody spoke after: it trains nothing."""
        end = len(self.mask) - next((i for i, bit in enumerate(reversed(self.mask)) if bit), len(self.mask))
        return Segment(
            tuple(self.ids[:end]),
            tuple(self.mask[:end]),
            np.asarray(self.logprobs[:end], dtype=np.float32),
            tuple(self.spans),
            tuple(image for image in self.images if image.end <= end),
            Support.joined(self.supports, end),
        )
