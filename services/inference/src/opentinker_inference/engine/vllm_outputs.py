"""What goes into vLLM for one completion, and what comes out: tokens with their logprobs, in runs or at once.

The engine reports logprobs flat: at each place first those of the sampled token, then those of the likeliest
ones, among which it may stand again.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

from opentinker_inference.domain.sampling import (
    MAX_SUPPORT,
    Completion,
    Delta,
    SampleJob,
    StopReason,
    not_finite,
    support_table,
)
from opentinker_inference.engine.vllm_spans import version_spans
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

MAX_LOGPROBS = MAX_SUPPORT + 1
"""Most that are asked for at one place: one more than a support may hold shows that it holds more."""
_TIES = 16
"""Tokens tied with the last one kept by top-k are kept too; so many are looked at beyond it."""


def sampling_params(job: SampleJob, index: int) -> Any:
    """A job's parameters for completion `index`, as vLLM takes them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    p = job.params
    return SamplingParams(
        n=1,
        max_tokens=p.max_tokens,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        seed=p.seed + index,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty,
        stop=list(p.stop) or None,
        # The model's end tokens are given here, so that they mean the same to every engine.
        ignore_eos=True,
        stop_token_ids=sorted(job.stops_at()),
        bad_words=list(p.bad_words) or None,
        logit_bias=dict(p.logit_bias) or None,
        structured_outputs=StructuredOutputsParams(json=p.json_schema) if p.json_schema else None,
        logprobs=max(p.top_logprobs, _looked_at(job)),
        flat_logprobs=True,
        prompt_logprobs=0 if p.prompt_logprobs and index == job.indices[0] else None,
        detokenize=bool(p.stop),
        output_kind=RequestOutputKind.DELTA if job.stream else RequestOutputKind.FINAL_ONLY,
    )


def _looked_at(job: SampleJob) -> int:
    """How many of the likeliest tokens show a place's support; 0 where it is not wanted, or is everything."""
    p = job.params
    cut_off = p.temperature > 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)
    if not (p.return_support and cut_off):
        return 0
    return min(MAX_LOGPROBS, p.top_k + _TIES) if p.top_k > 0 else MAX_LOGPROBS


class Outputs:
    """One completion under way."""

    def __init__(self, job: SampleJob, index: int) -> None:
        self._job = job
        self._index = index
        self._looked_at = _looked_at(job)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_ids: list[tuple[int, ...]] = []
        self._top_logprobs: list[tuple[float, ...]] = []
        self._support: list[tuple[int, tuple[int, ...]]] = []

    def take(self, output: Any) -> Delta:
        """New tokens; INVALID_WEIGHTS where their logprobs are no numbers."""
        start = len(self._ids)
        ids = tuple(int(token) for token in output.token_ids)
        flat = output.logprobs
        self._ids += ids
        for place, token in enumerate(ids):
            first, end = flat.start_indices[place], flat.end_indices[place]
            assert flat.token_ids[first] == token, "the sampled token comes first"
            self._logprobs.append(flat.logprobs[first])
            if end - first > 1:
                self._rank(flat.token_ids[first:end], flat.logprobs[first:end])
        if not all(map(math.isfinite, self._logprobs[start:])):
            raise not_finite(self._job.weights)
        return Delta(
            self._index,
            start,
            ids,
            tuple(self._logprobs[start:]),
            tuple(self._top_ids[start:]),
            tuple(self._top_logprobs[start:]),
        )

    def completion(self, output: Any, *, merged: bool) -> Completion:
        """The whole, when its last tokens were taken."""
        params = self._job.params
        reason, matched = self._end(output)
        places: Iterable[tuple[int, tuple[int, ...]]] = self._support or ((0, ()) for _ in self._ids)
        sizes, support = support_table(places)
        return Completion(
            index=self._index,
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            stop_reason=reason,
            matched_stop=matched,
            top_ids=tuple(self._top_ids),
            top_logprobs=tuple(self._top_logprobs),
            support_sizes=sizes if params.return_support else (),
            support_ids=support,
            spans=version_spans(self._job, output.weight_versions) if merged else (),
        )

    def _rank(self, ids: list[int], logprobs: list[float]) -> None:
        """Note the likeliest tokens of a place, and those that could be sampled there."""
        ranked = sorted(dict(zip(ids, logprobs, strict=True)).items(), key=lambda item: -item[1])
        wanted = self._job.params.top_logprobs
        if wanted:
            self._top_ids.append(tuple(token for token, _ in islice(ranked, wanted)))
            self._top_logprobs.append(tuple(logprob for _, logprob in islice(ranked, wanted)))
        if self._looked_at:
            kept = sorted(token for token, logprob in ranked if logprob > -math.inf)
            # As many as were asked for: there may be more.
            full = len(kept) >= self._looked_at
            self._support.append((-1, ()) if full or len(kept) > MAX_SUPPORT else (len(kept), tuple(kept)))

    def _end(self, output: Any) -> tuple[StopReason, str]:
        if output.finish_reason == "length":
            return StopReason.LENGTH, ""
        if output.finish_reason != "stop":
            if self._job.params.json_schema:
                raise bad_schema("it cannot be compiled")
            raise ServiceError(Reason.INTERNAL, f"vLLM ended a completion with {output.finish_reason!r}")
        if isinstance(output.stop_reason, str):
            return StopReason.STOP, output.stop_reason
        return self._job.reason_for(self._ids[-1]) or StopReason.STOP, ""


def prompt_scores(tokens: tuple[int, ...], output: Any) -> tuple[float, ...]:
    """Logprob of each token of a prompt; entry 0 is NaN."""
    flat = output.prompt_logprobs
    scores = [float("nan")]
    for place, token in enumerate(tokens[1:], start=1):
        first = flat.start_indices[place]
        assert flat.token_ids[first] == token, "the prompt's own token comes first"
        scores.append(flat.logprobs[first])
    return tuple(scores)


def bad_schema(why: str) -> ServiceError:
    """A schema that the engine cannot follow."""
    return ServiceError(
        Reason.INVALID_FIELD,
        f"json_schema is none that this engine can follow: {why}",
        field="params.json_schema",
    )
