"""Requests for completions, what is allowed in them, and what is used where nothing was asked for.

Token ids are Python ints, logprobs floats in nats. Nothing here knows an engine or a wire; both the front and
the engine children speak in these types.
"""

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from opentinker_inference.domain.images import Images
from opentinker_inference.domain.versions import VersionSpan
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

MAX_COMPLETIONS = 256
MAX_TOP_LOGPROBS = 256
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_WORD_CHARACTERS = 1024
"""Of a stop string or a bad word."""
MAX_SCHEMA_CHARACTERS = 64 * 1024
MAX_TOP_ENTRIES = 2**19
"""Of a completion's table of top logprobs: what a tensor carries inline."""
MAX_SUPPORT = 256
"""Ids listed at one place of a completion."""
MAX_SUPPORT_ENTRIES = 2**21
"""Ids listed in one completion; from there on places say that theirs are not listed."""
MAX_SEED = 2**63 - 1
"""Seeds are uint64 on the wire; engines take a signed one, so larger ones are refused, not wrapped."""


class StopReason(StrEnum):
    """What ended a completion."""

    END = "end"
    """A token that ends the model's turn; it is the last token."""
    STOP = "stop"
    """A stop string or stop token of the request."""
    LENGTH = "length"
    """max_tokens or the context."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample, with every default filled in. `max_tokens` 0 means: what the context leaves."""

    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_in_output: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    return_support: bool = False
    json_schema: str = ""
    raw_logprobs: bool = False


FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One request as an engine gets it. Completion i is sampled with seed `params.seed + i`.

    `indices` are the completions wanted, usually 0..n-1; after a crash only those not finished. `weights` is
    the key of loaded weights, "" for the base model. `end_token_ids` end a completion unless
    `params.ignore_eos`. `params.max_tokens` is at least 1 and fits the context.
    """

    request_id: str
    weights: str
    prompt: tuple[int, ...]
    indices: tuple[int, ...]
    params: SamplingParams
    end_token_ids: tuple[int, ...]
    images: Images = ()
    """Of the prompt."""
    may_continue: bool = False
    """Whether other weights of the same policy may replace those it names while it runs."""
    stream: bool = False
    """Whether Deltas are wanted."""

    def stops_at(self) -> frozenset[int]:
        """Every token id that ends a completion."""
        ends = () if self.params.ignore_eos else self.end_token_ids
        return frozenset(ends) | frozenset(self.params.stop_token_ids)

    def reason_for(self, token_id: int) -> StopReason | None:
        """Why `token_id` ends a completion, or None."""
        if token_id in self.params.stop_token_ids:
            return StopReason.STOP
        if not self.params.ignore_eos and token_id in self.end_token_ids:
            return StopReason.END
        return None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled sequence. `logprobs` has the length of `token_ids` and is of the distribution sampled
    from: after penalties, bias, temperature, min-p, top-k and top-p; at temperature 0 of that at
    temperature 1. `top_ids` and `top_logprobs` are [tokens][k] where asked for, `raw_logprobs` [tokens].

    `support_sizes` [tokens], where asked for, says how many ids could be sampled at each place after min-p,
    top-k and top-p: 0 where nothing was cut off, -1 where they are not listed, otherwise as many stand in
    `support_ids`, the sampled one among them.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    matched_stop: str = ""
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    """Of a job that may continue: which version sampled which tokens. Otherwise () for the one it names."""
    support_sizes: tuple[int, ...] = ()
    support_ids: tuple[int, ...] = ()
    raw_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of a completion from `start` on, before it has finished; its last ones come with it."""

    index: int
    start: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Raw logprobs of a prompt's tokens; entry 0 is NaN."""

    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SampleDone:
    """Last event of an engine's answer."""

    engine_s: float
    cached_prompt_tokens: int = 0


SampleEvent = Completion | Delta | PromptScores | SampleDone


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Sequences whose tokens are to be scored under `weights`, at `temperature`, over the full support."""

    request_id: str
    weights: str
    sequences: tuple[tuple[int, ...], ...]
    temperature: float = 1.0
    images: tuple[Images, ...] = ()
    """Of each sequence; () where none has any."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine that has started offers."""

    engine: str
    dtype: str
    serving_mode: str
    max_resident_versions: int
    context_tokens: int
    vocab_size: int
    deterministic: bool
    sampling_fields: tuple[str, ...] = field(default=FIELDS)
    score_temperature: bool = True
    """Whether scoring takes a temperature other than 1."""
    pid: int = 0
    images: bool = False
    """Whether prompts may hold images."""
    continues: bool = False
    """Whether running jobs can go on under other weights."""


def not_finite(weights: str) -> ServiceError:
    """What a request is told when the model's output is NaN: such a token must never be trained on."""
    name = f"weights {weights}" if weights else "the base model"
    return ServiceError(Reason.INVALID_WEIGHTS, f"{name} gave logprobs that are not finite")


def support_table(
    places: Iterable[tuple[int, tuple[int, ...]]], max_entries: int = MAX_SUPPORT_ENTRIES
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`Completion.support_sizes` and `support_ids` of what each place says; what no longer fits is not
    listed.
    """
    sizes: list[int] = []
    ids: list[int] = []
    for size, support in places:
        fits = len(ids) + len(support) <= max_entries
        sizes.append(size if fits else -1)
        ids += support if fits else ()
    return tuple(sizes), tuple(ids)


def cut_at_stop(text: str, matched_stop: str, include_stop: bool) -> str:
    """Decoded text of a completion without the stop string that ended it, and what came with its tokens."""
    at = text.find(matched_stop) if matched_stop else -1
    if at < 0:
        return text
    return text[: at + len(matched_stop)] if include_stop else text[:at]


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise INVALID_FIELD, naming every field that is out of range."""
    bad: list[tuple[str, str]] = []

    def want(ok: bool, name: str, text: str) -> None:
        if not ok:
            bad.append((f"params.{name}", f"{name} must be {text}"))

    p = params
    want(p.max_tokens >= 1, "max_tokens", "at least 1")
    hot = _finite(p.temperature) and 0.01 <= p.temperature <= 2
    want(hot or p.temperature == 0, "temperature", "0 (greedy), or in [0.01, 2]")
    want(_finite(p.top_p) and 0 < p.top_p <= 1, "top_p", "in (0, 1]; 1 is off")
    want(p.top_k == -1 or p.top_k >= 1, "top_k", "at least 1, or -1 for off")
    want(_finite(p.min_p) and 0 <= p.min_p <= 1, "min_p", "in [0, 1]; 0 is off")
    want(len(p.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
    want(all(p.stop), "stop", "without empty strings")
    want(_short(p.stop), "stop", f"strings of at most {MAX_WORD_CHARACTERS} characters")
    want(_in_vocab(p.stop_token_ids, vocab_size), "stop_token_ids", f"in [0, {vocab_size})")
    want(0 <= p.seed <= MAX_SEED - MAX_COMPLETIONS, "seed", f"at most {MAX_SEED - MAX_COMPLETIONS}")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(p, name)
        want(_finite(value) and -2 <= value <= 2, name, "in [-2, 2]")
    want(_finite(p.repetition_penalty) and p.repetition_penalty > 0, "repetition_penalty", "above 0")
    want(len(p.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words")
    want(all(word.strip() for word in p.bad_words), "bad_words", "without empty words")
    want(_short(p.bad_words), "bad_words", f"words of at most {MAX_WORD_CHARACTERS} characters")
    want(_in_vocab([t for t, _ in p.logit_bias], vocab_size), "logit_bias", f"for ids in [0, {vocab_size})")
    want(all(_finite(b) and -100 <= b <= 100 for _, b in p.logit_bias), "logit_bias", "in [-100, 100]")
    want(0 <= p.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"in [0, {MAX_TOP_LOGPROBS}]")
    fits = p.max_tokens * p.top_logprobs <= MAX_TOP_ENTRIES
    want(fits, "top_logprobs", f"at most {MAX_TOP_ENTRIES} together with max_tokens ({p.max_tokens} tokens)")
    short = len(p.json_schema) <= MAX_SCHEMA_CHARACTERS
    want(short, "json_schema", f"a schema of at most {MAX_SCHEMA_CHARACTERS} characters")
    ends = not (p.json_schema and p.ignore_eos)
    want(ends, "json_schema", "without ignore_eos: where the text is complete, only an end token can follow")
    want(not short or _is_schema(p.json_schema), "json_schema", "a JSON schema (an object, as JSON text)")
    if bad:
        text = "; ".join(message for _, message in bad)
        raise ServiceError(Reason.INVALID_FIELD, text, violations=bad)


def check_supported(params: SamplingParams, supported: tuple[str, ...], engine: str) -> None:
    """Raise UNSUPPORTED_OPTION, naming each field that was set and that the engine does not honour."""
    defaults = SamplingParams()
    unsupported = [
        name for name in FIELDS if name not in supported and getattr(params, name) != getattr(defaults, name)
    ]
    if unsupported:
        names = ", ".join(unsupported)
        raise ServiceError(
            Reason.UNSUPPORTED_OPTION,
            f"the {engine} engine does not support: {names}; GetCapabilities lists what it does",
            violations=[(f"params.{name}", f"not supported by the {engine} engine") for name in unsupported],
        )


def check_tokens(tokens: tuple[int, ...], vocab_size: int, field_name: str) -> None:
    """Raise INVALID_FIELD for an empty sequence or an id outside the vocabulary."""
    if not tokens:
        raise ServiceError(Reason.INVALID_FIELD, f"{field_name} has no tokens", field=field_name)
    outside = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if outside is not None:
        text = f"token id {outside} is outside the vocabulary of {vocab_size}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field_name)


def fit_to_context(params: SamplingParams, prompt_tokens: int, context_tokens: int) -> SamplingParams:
    """Clamp `max_tokens` to what the context leaves; PROMPT_TOO_LONG if it leaves nothing."""
    room = context_tokens - prompt_tokens
    if room < 1:
        raise ServiceError(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens and the context holds {context_tokens}, one of which "
            "must be left for the completion; shorten the prompt",
            field="prompt",
            metadata={"prompt_tokens": prompt_tokens, "context_tokens": context_tokens},
        )
    asked = params.max_tokens or room
    return dataclasses.replace(params, max_tokens=min(asked, room))


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _short(words: tuple[str, ...]) -> bool:
    return all(len(word) <= MAX_WORD_CHARACTERS for word in words)


def _is_schema(text: str) -> bool:
    """Whether there is none, or one that is JSON; what it says is for the engine to judge."""
    try:
        return not text or isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _in_vocab(ids: "list[int] | tuple[int, ...]", vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in ids)
