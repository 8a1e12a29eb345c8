"""How to sample."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opentinker.errors import invalid, unsupported
from opentinker.sampling.support import MAX_SUPPORT
from opentinkerapi.inference.v1 import sampling_pb2

DEFAULT_SUPPORT = 200
"""Below MAX_SUPPORT, because what ties with the last token is kept too."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. A field left None is the server's default; an engine that cannot honour one refuses it
    by name.
    """

    max_tokens: int | None = None
    """Most new tokens of a completion. Default: what the context leaves."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    return_support: bool = False
    """Return which ids top_p, top_k and min_p kept at each token, at most 256 of them."""
    json_schema: str | Mapping[str, Any] | None = None
    """Only text that this JSON schema allows can be sampled; as JSON text, or as the object that it is."""
    include_stop_in_output: bool = False
    """Keep the stop string in the text."""
    top_logprobs: int = 0
    """How many of the most likely tokens to return at each place."""
    raw_logprobs: bool = False
    """Return logprobs at temperature 1, before penalties, bias and truncation, too."""
    prompt_logprobs: bool = False
    """Return the logprobs of the prompt's tokens, too."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise invalid("max_tokens", f"must be at least 1, not {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise invalid("temperature", f"must be a finite number of at least 0, not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise invalid("top_p", f"must be in (0, 1], not {self.top_p}")
        if self.top_k is not None and not (self.top_k == -1 or self.top_k >= 1):
            raise invalid("top_k", f"must be -1 (off) or at least 1, not {self.top_k}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise invalid("min_p", f"must be in [0, 1], not {self.min_p}")

        if self.top_logprobs < 0:
            raise invalid("top_logprobs", f"must be at least 0, not {self.top_logprobs}")
        if isinstance(self.json_schema, str):
            try:
                json.loads(self.json_schema)
            except ValueError as error:
                raise invalid("json_schema", f"is no JSON: {error}") from error

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be drawn, because they are too unlikely."""
        return not (self.top_p in (None, 1.0) and self.top_k in (None, -1) and self.min_p in (None, 0.0))

    @property
    def plain(self) -> bool:
        """Whether the logits are the model's own, which is what a trainer computes."""
        return (
            not (self.bad_words or self.logit_bias or self.json_schema is not None)
            and self.presence_penalty in (None, 0.0)
            and self.frequency_penalty in (None, 0.0)
            and self.repetition_penalty in (None, 1.0)
        )

    def check_tokens_only(self, field: str) -> None:
        """UnsupportedOption where they ask for more than tokens, their logprobs and their text, and whoever
        samples in the end has no place for it. `field`: what the parameters are called there.
        """
        for name in ("top_logprobs", "raw_logprobs", "prompt_logprobs"):
            if getattr(self, name):
                raise unsupported(f"{field}.{name}", "is not kept here; ask for it in policy.sample")

    def for_training(self) -> "SamplingParams":
        """The same, with what a loss with an importance ratio needs: where tokens are cut off, the sets of
        those that were kept. A top_p or min_p without a top_k gets top_k=200, so that the sets can be listed.
        InvalidArgument for a top_k beyond 256.
        """
        if not self.cuts:
            return self
        top_k = self.top_k if self.top_k not in (None, -1) else DEFAULT_SUPPORT
        if top_k > MAX_SUPPORT:
            text = f"at most {MAX_SUPPORT} in training, where the ids that were kept are listed; not {top_k}"
            raise invalid("sampling.top_k", text)
        return replace(self, top_k=top_k, return_support=True)

    def to_wire(self, seed: int | None, **extra: Any) -> sampling_pb2.SamplingParams:
        """As a message; `extra` are fields that belong to one request only."""
        optional = {
            name: value
            for name in (
                "max_tokens",
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
            )
            if (value := getattr(self, name)) is not None
        }
        schema = "" if self.json_schema is None else self.json_schema
        return sampling_pb2.SamplingParams(
            json_schema=schema if isinstance(schema, str) else json.dumps(schema),
            include_stop_in_output=self.include_stop_in_output,
            top_logprobs=self.top_logprobs,
            raw_logprobs=self.raw_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            temperature=self.temperature,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            seed=seed,
            ignore_eos=self.ignore_eos,
            return_support=self.return_support,
            bad_words=self.bad_words,
            logit_bias=dict(self.logit_bias),
            **optional,
            **extra,
        )
