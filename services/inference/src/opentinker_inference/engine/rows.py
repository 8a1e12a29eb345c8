"""Turns one row of logits into one token: penalties, bias, temperature, truncation, draw.

Everything works on a single row [V] in float32, so that what one row gets cannot depend on its neighbours.
The draw is a pure function of (seed, step): no generator state survives a step, nothing is shared.

Order, the same as vLLM's: logit bias, bad words, penalties; temperature; min-p; top-k and top-p.
"""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opentinker_inference.domain.sampling import MAX_SUPPORT, SamplingParams


@dataclass(frozen=True, slots=True)
class Pick:
    """A sampled token, its logprob under the distribution it was drawn from, and what else was asked for.

    `support_size` is 0 where nothing was cut off, -1 where the ids that could be drawn are too many to list.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    support_size: int = 0
    support: tuple[int, ...] = ()
    raw_logprob: float = 0.0


class RowSampler:
    """Samples the tokens of one completion, in order."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
    ) -> None:
        self._params = params
        self._seed = seed
        self._bad_words = tuple(bad_words)
        self._generated: list[int] = []
        self._prompt_ids = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset[int]()
        self._bias_ids = torch.tensor([t for t, _ in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([b for _, b in params.logit_bias], dtype=torch.float32)

    def pick(self, logits: torch.Tensor) -> Pick:
        """Sample from `logits` [V]; the tensor is not changed."""
        params = self._params
        row = self._adjusted(logits.to(torch.float32))
        size = 0
        support: tuple[int, ...] = ()
        if params.temperature == 0.0:
            logprobs = torch.log_softmax(row, dim=-1)
            token = int(torch.argmax(row))
        else:
            scaled = row / params.temperature
            row = truncate(scaled, params.min_p, params.top_k, params.top_p)
            logprobs = torch.log_softmax(row, dim=-1)
            token = draw(logprobs, uniform(self._seed, len(self._generated)))
            if params.return_support:
                size, support = _support(scaled, row)
        self._generated.append(token)
        pick = Pick(token, float(logprobs[token]), support_size=size, support=support)
        if params.raw_logprobs:
            raw = torch.log_softmax(logits.to(torch.float32), dim=-1)
            pick = dataclasses.replace(pick, raw_logprob=float(raw[token]))
        if params.top_logprobs:
            top = torch.topk(logprobs, min(params.top_logprobs, logprobs.numel()))
            ids, values = tuple(top.indices.tolist()), tuple(top.values.tolist())
            pick = dataclasses.replace(pick, top_ids=ids, top_logprobs=values)
        return pick

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        params = self._params
        row = logits.clone()
        if self._bias.numel():
            row[self._bias_ids] += self._bias
        for word in self._bad_words:
            before = list(word[:-1])
            if not before or self._generated[-len(before) :] == before:
                row[word[-1]] = -torch.inf
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt_ids | set(self._generated)), dtype=torch.long)
            values = row[seen]
            penalty = params.repetition_penalty
            row[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._generated and (params.presence_penalty or params.frequency_penalty):
            tally = Counter(self._generated)
            ids = torch.tensor(list(tally), dtype=torch.long)
            row[ids] -= params.frequency_penalty * torch.tensor(list(tally.values()), dtype=torch.float32)
            row[ids] -= params.presence_penalty
        return row


def truncate(row: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """Set to -inf what min-p, top-k and top-p leave out of `row` [V] (logits after temperature).

    Tokens tied with the last one kept by top-k are kept too.
    """
    if min_p > 0.0:
        probs = torch.softmax(row, dim=-1)
        row = row.masked_fill(probs < min_p * probs.max(), -torch.inf)
    if 0 < top_k < row.numel():
        kth = torch.topk(row, top_k).values[-1]
        row = row.masked_fill(row < kth, -torch.inf)
    if top_p < 1.0:
        ordered, index = torch.sort(row, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probs, dim=-1) - probs
        drop = before >= top_p
        drop[0] = False
        row = row.index_fill(0, index[drop], -torch.inf)
    return row


def _support(scaled: torch.Tensor, kept: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """How many ids can be drawn, as `Completion.support_sizes` says it, and which."""
    ids = torch.isfinite(kept).nonzero()[:, 0]
    if ids.numel() == int(torch.isfinite(scaled).sum()):
        return 0, ()
    if ids.numel() > MAX_SUPPORT:
        return -1, ()
    return ids.numel(), tuple(ids.tolist())


def draw(logprobs: torch.Tensor, u: float) -> int:
    """The token at `u` in [0, 1) of the distribution's cumulative function; never one of probability 0."""
    cdf = torch.cumsum(torch.exp(logprobs.to(torch.float64)), dim=-1)
    # right=True skips tokens of probability 0: it finds the first entry above the target.
    target = torch.tensor(u * float(cdf[-1]), dtype=torch.float64)
    return int(torch.searchsorted(cdf, target, right=True).clamp(max=cdf.numel() - 1))


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments, the same on every machine."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + step.to_bytes(8, "little"), digest_size=8, person=b"ot-sample"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
