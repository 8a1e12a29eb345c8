"""What sampling gives: completions, and what comes of one while it is sampled."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinker.sampling.support import Support
from opentinkerapi.data.v1 import tensor_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.runtime.tensors import unpack, unpack_floats, unpack_ids

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class StopReason(StrEnum):
    """What ended a completion."""

    END = "END"
    """A token that ends the model's turn, which is the last token."""
    STOP = "STOP"
    """A stop string or stop token of the request."""
    LENGTH = "LENGTH"
    """`max_tokens` or the context."""
    CANCELLED = "CANCELLED"
    """The caller cancelled."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled sequence, as the sampler gave it: ids are never made from the text again.

    `logprobs` [n] float32 are of the distribution sampled from; `version` is the policy version that sampled.
    What follows `support` is None where it was not asked for.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: Floats
    stop_reason: StopReason
    text: str
    seed: int
    spans: tuple[tuple[int, int, int], ...] = ()
    """(start, end, version) of runs of tokens."""
    support: Support | None = None
    """What each token was chosen among, where that was asked for."""
    matched_stop: str = ""
    """The stop string that ended it."""
    raw_logprobs: Floats | None = None
    """[n]: at temperature 1, before penalties, bias and truncation."""
    top_token_ids: Ints | None = None
    """[n, k]: the most likely tokens at each place, most likely first."""
    top_logprobs: Floats | None = None
    """[n, k]: theirs, of the distribution sampled from."""
    prompt_logprobs: Floats | None = None
    """[prompt tokens]: of the prompt that it follows; entry 0 is NaN."""

    @classmethod
    def of_wire(
        cls, completion: sampling_pb2.Completion, prompt_logprobs: Floats | None = None
    ) -> "Completion":
        """From a message."""
        ids = tuple(unpack_ids(completion.token_ids))
        name = sampling_pb2.StopReason.Name(completion.stop_reason).removeprefix("STOP_REASON_")
        return cls(
            index=completion.index,
            token_ids=ids,
            logprobs=unpack_floats(completion.logprobs),
            stop_reason=StopReason(name) if name in StopReason.__members__ else StopReason.LENGTH,
            text=completion.text,
            seed=completion.seed,
            spans=tuple((span.start, span.end, span.version) for span in completion.version_spans),
            support=Support.of_wire(completion.support_sizes, completion.support_token_ids),
            matched_stop=completion.matched_stop,
            raw_logprobs=unpack_floats(completion.raw_logprobs) if completion.raw_logprobs else None,
            top_token_ids=_table(completion.top_token_ids),
            top_logprobs=_table(completion.top_logprobs),
            prompt_logprobs=prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """What a completion has gained since its last one. Its deltas, joined, are the completion."""

    index: int
    """Which completion."""
    token_ids: tuple[int, ...]
    """[m]; none where only text was held back."""
    logprobs: Floats
    """[m]"""
    text: str
    """Whole characters only; what a later token may change, or a stop string swallow, comes later."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """(start, end, version), counted from the completion's first token; none for a request that may go on
    under another version, whose completion has them."""
    top_token_ids: Ints | None = None
    """[m, k], where asked for."""
    top_logprobs: Floats | None = None
    """[m, k], where asked for."""

    @classmethod
    def of_wire(cls, delta: sampling_pb2.CompletionDelta) -> "Delta":
        """From a message."""
        return cls(
            delta.index,
            tuple(unpack_ids(delta.token_ids)),
            unpack_floats(delta.logprobs),
            delta.text,
            tuple((span.start, span.end, span.version) for span in delta.version_spans),
            _table(delta.top_token_ids),
            _table(delta.top_logprobs),
        )

    def after(self, tokens: int, characters: int) -> "Delta":
        """Without its first tokens and characters."""
        begin = self.spans[0][0] + tokens if self.spans else 0
        return replace(
            self,
            token_ids=self.token_ids[tokens:],
            logprobs=self.logprobs[tokens:],
            text=self.text[characters:],
            spans=tuple(
                (max(start, begin), end, version) for start, end, version in self.spans if end > begin
            ),
            top_token_ids=None if self.top_token_ids is None else self.top_token_ids[tokens:],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[tokens:],
        )


def prompt_scores(event: inference_service_pb2.PromptLogprobs) -> Floats:
    """Logprobs of a prompt's tokens; entry 0 is NaN."""
    return unpack_floats(event.logprobs)


def _table(tensor: tensor_pb2.Tensor) -> NDArray[Any] | None:
    return unpack(tensor) if tensor.shape else None
