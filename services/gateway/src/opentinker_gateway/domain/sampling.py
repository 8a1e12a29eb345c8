"""What is asked of an engine, and what it answers, as the gateway's own values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

MAX_SEED = 2**53
"""Seeds above this are not exact in every language's numbers."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample; None and what is empty are the engine's defaults."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop_in_output: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    return_support: bool = False
    json_schema: str = ""


class StopReason(StrEnum):
    """What ended a completion."""

    END = "END"
    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """A run of n sampled tokens. `top` [n] has the likeliest ones of each position where asked for."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[Alternative, ...], ...] = ()

    def after(self, count: int) -> "Tokens":
        """Without the first `count`."""
        return Tokens(self.ids[count:], self.logprobs[count:], self.top[count:])


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    prompt_tokens: int
    cached_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Delta:
    """What one completion has gained."""

    index: int
    text: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Support:
    """Which ids could be sampled at n positions: how many at each (0: all), and these ids end to end. Empty
    where nothing was cut.
    """

    sizes: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole completion. `spans` are (start, end, version) of runs of its tokens; none for a base model."""

    index: int
    text: str
    tokens: Tokens
    stop_reason: StopReason
    matched_stop: str
    spans: tuple[tuple[int, int, int], ...] = ()
    support: Support = field(default_factory=Support)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Raw logprobs of the prompt's tokens; the first is NaN."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing new; the request still runs."""


Event = Started | Delta | Finished | PromptScores | Waiting
