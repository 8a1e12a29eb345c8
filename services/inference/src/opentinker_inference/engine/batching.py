"""Continuous batching that no request can notice: what a row computes depends on that row alone.

Each prompt is run alone. Decoding batches rows of equal weights and equal capacity, and a row's capacity is
a function of its length only; batches are filled up to a multiple of `quantum` rows, sizes in which a row's
bits do not depend on the other rows (`selftest` finds it). So when a row was admitted, and beside whom,
changes nothing. Where no such sizes exist, `quantum` is 0 and each row has a batch of its own.

Single-threaded: `submit`, `cancel` and `step` are called from one thread.
"""

import math
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import torch

from opentinker_inference.domain.sampling import (
    Completion,
    Delta,
    PromptScores,
    SampleDone,
    SampleEvent,
    SampleJob,
    StopReason,
    not_finite,
    support_table,
)
from opentinker_inference.engine.kv import FIRST_ROWS, Slab, capacity_for
from opentinker_inference.engine.model import DeterministicModel
from opentinker_inference.engine.rows import Pick, RowSampler
from opentinker_inference.engine.text import StopStrings, Text
from opentinker_kit.errors import ServiceError

_PREFIX_BYTES = 256 << 20


@dataclass(slots=True)
class _Job:
    """A request under way; `left` counts completions that have not ended."""

    job: SampleJob
    started: float
    left: int
    bad_words: list[tuple[int, ...]]
    cancelled: bool = False
    cached_tokens: int = 0


@dataclass(slots=True)
class _Row:
    """One completion under way. `length` counts the places in its cache; a token's position is its place plus
    `shift`.
    """

    owner: _Job
    index: int
    sampler: RowSampler
    stops: StopStrings
    length: int
    shift: int
    ids: list[int] = field(default_factory=list)
    picks: list[Pick] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prompt that was run: its cache, the logits after it, its tokens' logprobs where they were asked.

    `shift` is the position minus the place of the tokens that follow.
    """

    cache: torch.Tensor
    logits: torch.Tensor
    scores: tuple[float, ...]
    shift: int


_Events = list[tuple[str, SampleEvent | ServiceError]]
_PrefixKey = tuple[str, tuple[int, ...], tuple[str, ...]]
"""Weights, token ids, digests of the images: the ids alone do not tell one image from another."""
_SlabKey = tuple[str, int, int]
"""Weights, capacity, and in solo mode the row's own number."""


class Batcher:
    """Turns submitted jobs into events, a bit of work at a time."""

    def __init__(self, model: DeterministicModel, text: Text, max_rows: int, cache_bytes: int) -> None:
        """At most `max_rows` rows decode at once, and as many as `cache_bytes` hold at their full length."""
        self._model = model
        self._text = text
        self._max_rows = max_rows
        self._cache_bytes = cache_bytes
        self._waiting: deque[tuple[_Job, int]] = deque()
        self._slabs: dict[_SlabKey, tuple[Slab, list[_Row]]] = {}
        self._prefixes: OrderedDict[_PrefixKey, _Prefix] = OrderedDict()
        self._jobs: dict[str, _Job] = {}
        self._solo_rows = 0
        self.quantum = FIRST_ROWS

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._waiting or self._slabs)

    def submit(self, job: SampleJob) -> None:
        """Queue a job. ServiceError if its weights are not loaded or its text options cannot be honoured."""
        bad_words = self._text.bad_words(job.params.bad_words) if job.params.bad_words else []
        if job.params.stop:
            self._text.decode([])  # raises now, not in the middle of a batch, where there is no tokenizer
        state = _Job(job, time.monotonic(), len(job.indices), bad_words)
        self._jobs[job.request_id] = state
        self._waiting.extend((state, index) for index in job.indices)

    def cancel(self, request_id: str) -> None:
        """Stop a job; its rows leave at the next step and no event follows."""
        state = self._jobs.pop(request_id, None)
        if state is not None:
            state.cancelled = True

    def forget(self, weights: str | None) -> None:
        """Drop prompts that were run under `weights`, or under any."""
        for key in [key for key in self._prefixes if weights is None or key[0] == weights]:
            del self._prefixes[key]

    def step(self) -> list[tuple[str, SampleEvent | ServiceError]]:
        """Run at most one new prompt, and one decoding step of every batch."""
        events: list[tuple[str, SampleEvent | ServiceError]] = []
        self._admit(events)
        for key in list(self._slabs):
            self._decode(key, events)
        return events

    # Prompts

    def _admit(self, events: _Events) -> None:
        ran_prompt = False
        while self._waiting:
            owner, index = self._waiting[0]
            if owner.cancelled:
                self._waiting.popleft()
                continue
            if not self._has_room(owner.job):
                return
            prefix, cached = self._prefix(owner.job, may_run=not ran_prompt)
            if prefix is None:
                return
            ran_prompt = ran_prompt or not cached
            self._waiting.popleft()
            if index == owner.job.indices[0]:
                owner.cached_tokens = len(owner.job.prompt) if cached else 0
                if owner.job.params.prompt_logprobs:
                    events.append((owner.job.request_id, PromptScores(prefix.scores)))
            row = self._new_row(owner, index, prefix.shift)
            self._model.one_thread()
            if not self._extend(row, prefix.logits, events):
                self._place(row, prefix.cache)

    def _has_room(self, job: SampleJob) -> bool:
        active = [row.owner.job for _, rows in self._slabs.values() for row in rows]
        if not active:
            return True
        needed = sum(map(self._full_bytes, [*active, job]))
        return len(active) < self._max_rows and needed <= self._cache_bytes

    def _full_bytes(self, job: SampleJob) -> int:
        return self._model.shape.row_bytes(capacity_for(len(job.prompt) + job.params.max_tokens))

    def _prefix(self, job: SampleJob, may_run: bool) -> tuple[_Prefix | None, bool]:
        key = (job.weights, job.prompt, tuple(image.digest for image in job.images))
        known = self._prefixes.get(key)
        if known is not None and (known.scores or not job.params.prompt_logprobs):
            self._prefixes.move_to_end(key)
            return known, True
        if not may_run:
            return None, False
        temperature = 1.0 if job.params.prompt_logprobs else None
        cache, logits, scores = self._model.prefill(job.weights, job.prompt, temperature, job.images)
        shift = self._model.shift(len(job.prompt), job.images)
        prefix = _Prefix(cache, logits, tuple(scores), shift)
        self._prefixes[key] = prefix
        # The newest one stays whatever its size: the rest of its group comes next.
        while len(self._prefixes) > 1 and self._prefix_bytes() > _PREFIX_BYTES:
            self._prefixes.popitem(last=False)
        return prefix, False

    def _prefix_bytes(self) -> int:
        return sum(p.cache.numel() * p.cache.element_size() for p in self._prefixes.values())

    def _new_row(self, owner: _Job, index: int, shift: int) -> _Row:
        job = owner.job
        sampler = RowSampler(job.params, job.params.seed + index, job.prompt, owner.bad_words)
        return _Row(owner, index, sampler, StopStrings(self._text, job.params.stop), len(job.prompt), shift)

    # Batches

    def _place(self, row: _Row, cache: torch.Tensor) -> None:
        """Put a row into the batch of its capacity; it must hold the next position."""
        capacity = max(cache.shape[3], capacity_for(row.length + 1))
        self._solo_rows += 1
        key = (row.owner.job.weights, capacity, self._solo_rows if self.quantum == 0 else 0)
        slab, rows = self._slabs.setdefault(key, (Slab(self._model.shape, capacity), []))
        slab.add(cache)
        rows.append(row)

    def _take_out(self, key: _SlabKey, place: int) -> None:
        slab, rows = self._slabs[key]
        last = slab.remove(place)
        rows[place] = rows[last]
        rows.pop()
        if not rows:
            del self._slabs[key]

    def _decode(self, key: _SlabKey, events: _Events) -> None:
        slab, rows = self._slabs[key]
        for place in reversed(range(len(rows))):
            if rows[place].owner.cancelled:
                self._take_out(key, place)
        if not rows:
            return
        fill = -len(rows) % (self.quantum or FIRST_ROWS)
        tokens = [row.ids[-1] for row in rows] + [0] * fill
        positions = [row.length for row in rows] + [0] * fill
        shifts = [row.shift for row in rows] + [0] * fill if any(row.shift for row in rows) else None
        logits = self._model.step(key[0], tokens, positions, slab.view(positions, len(positions)), shifts)
        self._model.one_thread()
        # Backwards, so that a row that moves into a freed place was already handled.
        for place in reversed(range(len(rows))):
            row = rows[place]
            row.length += 1
            if self._extend(row, logits[place], events):
                self._take_out(key, place)
            elif row.length >= slab.capacity:
                cache = slab.read(place).clone()
                self._take_out(key, place)
                self._place(row, cache)

    def _extend(self, row: _Row, logits: torch.Tensor, events: _Events) -> bool:
        """Sample the row's next token; True if that ended it."""
        job = row.owner.job
        pick = row.sampler.pick(logits)
        if not math.isfinite(pick.logprob):
            self.cancel(job.request_id)
            events.append((job.request_id, not_finite(job.weights)))
            return True
        row.ids.append(pick.token_id)
        row.picks.append(pick)
        reason = job.reason_for(pick.token_id)
        matched = "" if reason else row.stops.match(row.ids)
        if matched:
            reason = StopReason.STOP
        elif reason is None and len(row.ids) >= job.params.max_tokens:
            reason = StopReason.LENGTH
        if reason is None:
            if job.stream:
                events.append((job.request_id, _delta(row)))
            return False
        events.append((job.request_id, _completion(row, reason, matched)))
        row.owner.left -= 1
        if row.owner.left == 0:
            self._jobs.pop(job.request_id, None)
            elapsed = time.monotonic() - row.owner.started
            events.append((job.request_id, SampleDone(elapsed, row.owner.cached_tokens)))
        return True


def _delta(row: _Row) -> Delta:
    """The row's newest token."""
    pick = row.picks[-1]
    tops = ((pick.top_ids,), (pick.top_logprobs,)) if pick.top_ids else ((), ())
    return Delta(row.index, len(row.ids) - 1, (pick.token_id,), (pick.logprob,), *tops)


def _completion(row: _Row, reason: StopReason, matched: str) -> Completion:
    params, picks = row.owner.job.params, row.picks
    sizes, support = support_table((pick.support_size, pick.support) for pick in picks)
    return Completion(
        index=row.index,
        token_ids=tuple(row.ids),
        logprobs=tuple(pick.logprob for pick in picks),
        stop_reason=reason,
        matched_stop=matched,
        top_ids=tuple(pick.top_ids for pick in picks) if params.top_logprobs else (),
        top_logprobs=tuple(pick.top_logprobs for pick in picks) if params.top_logprobs else (),
        support_sizes=sizes if params.return_support else (),
        support_ids=support,
        raw_logprobs=tuple(pick.raw_logprob for pick in picks) if params.raw_logprobs else (),
    )
