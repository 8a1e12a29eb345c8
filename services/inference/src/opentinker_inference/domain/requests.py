"""Sample requests by their ids: run once, kept until acknowledged, joined by whoever asks again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from opentinker_inference.domain.images import Images
from opentinker_inference.domain.progress import Progress
from opentinker_inference.domain.sampling import (
    Completion,
    Delta,
    PromptScores,
    SampleDone,
    SampleEvent,
    SamplingParams,
)
from opentinker_inference.domain.versions import ModelRef
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

OWNER = "|"
"""Between the job that made a request and the id that it gave it; ids of jobs have none."""
KEEP_S = 600.0
"""How long the completions of a finished request are kept without an acknowledgement."""
_SWEEP_S = 1.0
MAX_KEPT_TOKENS = 16_000_000
"""Beyond this many kept tokens the oldest finished requests go first."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """A request as it came. `digest` tells whether another request under the same id is the same."""

    request_id: str
    digest: str
    model: ModelRef
    prompt: tuple[int, ...]
    params: SamplingParams
    seed_given: bool
    max_tokens_given: bool
    n: int = 1
    images: Images = ()
    may_continue: bool = False
    """Whether it may go on under another version of its policy."""
    stream: bool = False
    """Whether the caller reads along."""


@dataclass(slots=True)
class SampleCall:
    """A request under way or finished, with everything that came of it so far."""

    spec: SampleSpec
    params: SamplingParams
    """With every default filled in."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """Of every completion of which anything is known."""
    completions: list[Completion] = field(default_factory=list)
    """Those that have finished, in order."""
    stream: bool = False
    """Whether someone reads along."""
    prompt_scores: PromptScores | None = None
    engine_s: float = 0.0
    cached_prompt_tokens: int = 0
    error: ServiceError | None = None
    finished_at: float | None = None
    acknowledged: bool = False
    forgotten: bool = False
    task: asyncio.Task[None] | None = None
    _until: float | None = 0.0
    """When it ends unfinished, by the event loop's clock; None: never."""
    _limit: asyncio.Timeout | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return self.finished_at is not None

    @property
    def missing(self) -> tuple[int, ...]:
        """Completions that have not finished."""
        done = {completion.index for completion in self.completions}
        return tuple(i for i in range(self.spec.n) if i not in done)

    def add(self, event: SampleEvent) -> None:
        """Take in what an engine says."""
        if isinstance(event, Completion | Delta):
            progress = self.progress.setdefault(event.index, Progress())
            if progress.completion is not None:
                return  # it was given out: a second try may not replace it
            if isinstance(event, Delta):
                progress.add(event)
            else:
                progress.finish(event)
                self.completions.append(event)
        elif isinstance(event, PromptScores):
            self.prompt_scores = self.prompt_scores or event
        else:
            self.engine_s += event.engine_s
            self.cached_prompt_tokens = event.cached_prompt_tokens
        self._wake()

    def finish(self, now: float, error: ServiceError | None = None) -> None:
        """The run ended, well or not."""
        self.error = error
        self.finished_at = now
        self._wake()

    def restart(self) -> None:
        """Run again what is missing; what finished stays."""
        self.error = None
        self.finished_at = None
        self._until = 0.0

    def forget(self) -> None:
        """Let go of everything. A reader who has stopped reading may hold this object for long."""
        self.forgotten = True
        self.progress.clear()
        self.completions.clear()
        self.prompt_scores = None
        self._wake()

    def wait_for(self, within_s: float | None) -> None:
        """A caller waits so long (None: for ever); the latest of them all decides when to give up."""
        if within_s is None or self._until is None:
            self._until = None
        else:
            self._until = max(self._until, asyncio.get_running_loop().time() + within_s)
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._until)

    @contextlib.asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Run something until nobody waits any more; then DEADLINE_EXCEEDED."""
        try:
            async with asyncio.timeout_at(self._until) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            raise ServiceError(Reason.DEADLINE_EXCEEDED, "nobody waits for the request any longer") from None
        finally:
            self._limit = None

    async def follow(self, keep_alive_s: float, *, deltas: bool = False) -> AsyncIterator[SampleEvent | None]:
        """Everything so far and what comes, completions in order of finishing; None when nothing came for a
        while. With `deltas` each completion comes in parts first, the last of them when it has finished.

        Nothing is kept for a reader: one who is slow gets longer parts. Ends after SampleDone. Raises the
        error that ended the run.
        """
        done: set[int] = set()
        readers = [_Reader(index) for index in range(self.spec.n)] if deltas else []
        sent_scores = False
        while True:
            changed = self._changed
            if self.prompt_scores is not None and not sent_scores:
                sent_scores = True
                yield self.prompt_scores
            # Scores of the prompt come before what follows it, whatever engines finish first.
            ready = sent_scores or not self.params.prompt_logprobs
            for reader in readers if ready else ():
                while reader.index not in done and (delta := reader.next(self.progress)) is not None:
                    yield delta
            for completion in list(self.completions):
                if completion.index in done or (readers and not readers[completion.index].at_end(completion)):
                    continue
                done.add(completion.index)
                yield completion
            if changed.is_set():
                continue
            if self.error is not None:
                raise self.error
            if self.forgotten:
                text = "its completions are no longer kept"
                raise ServiceError(Reason.REQUEST_NOT_FOUND, text, field="request_id")
            if self.finished:
                yield SampleDone(self.engine_s, self.cached_prompt_tokens)
                return
            try:
                async with asyncio.timeout(keep_alive_s):
                    await changed.wait()
            except TimeoutError:
                yield None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True)
class _Reader:
    """How far one caller has read one completion."""

    index: int
    read: int = 0
    rewritten: int = 0

    def next(self, known: dict[int, Progress]) -> Delta | None:
        """What it has not read, as far as a message holds it."""
        progress = known.get(self.index)
        if progress is None:
            return None
        if progress.rewritten != self.rewritten:
            if self.read:
                text = "the engine died, and then sampled other tokens than those that were streamed"
                raise ServiceError(Reason.ENGINE_CRASHED, text, retry_after_s=0.0)
            self.rewritten = progress.rewritten
        part = progress.part(self.index, self.read)
        self.read += len(part.token_ids) if part is not None else 0
        return part

    def at_end(self, completion: Completion) -> bool:
        return self.read == len(completion.token_ids)


class RequestBook:
    """All requests that can be joined."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: dict[str, SampleCall] = {}
        self._swept_at = clock.monotonic()

    def find(self, spec: SampleSpec) -> SampleCall | None:
        """The call under this id. REQUEST_ID_REUSED if it asked for something else."""
        self._expire()
        call = self._calls.get(spec.request_id)
        if call is not None and call.spec.digest != spec.digest:
            raise ServiceError(
                Reason.REQUEST_ID_REUSED,
                f"request id {_given(spec.request_id)!r} was used with another request",
                field="request_id",
            )
        return call

    def open(self, spec: SampleSpec, params: SamplingParams) -> SampleCall:
        """A new call under its id."""
        call = SampleCall(spec, params)
        self._calls[spec.request_id] = call
        return call

    def get(self, request_id: str) -> SampleCall:
        """REQUEST_NOT_FOUND if nothing is held under the id."""
        call = self._calls.get(request_id)
        if call is None:
            text = f"no request is held under {_given(request_id)!r}; it was never made, or is forgotten"
            raise ServiceError(Reason.REQUEST_NOT_FOUND, text, field="request_id")
        return call

    def drop(self, request_id: str) -> None:
        self._calls.pop(request_id, None)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """Forget finished requests; running ones are forgotten when they finish. Unknown ids are ignored."""
        for request_id in request_ids:
            call = self._calls.get(request_id)
            if call is None:
                continue
            call.acknowledged = True
            if call.finished:
                del self._calls[request_id]

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return sum(not call.finished for call in self._calls.values())

    def _expire(self) -> None:
        now = self._clock.monotonic()
        if now - self._swept_at < _SWEEP_S:
            return
        self._swept_at = now
        done = sorted(
            (call.finished_at, request_id)
            for request_id, call in self._calls.items()
            if call.finished_at is not None
        )
        total = sum(_tokens(call) for call in self._calls.values())
        for finished_at, request_id in done:
            call = self._calls[request_id]
            if call.acknowledged or now - finished_at > KEEP_S or total > MAX_KEPT_TOKENS:
                del self._calls[request_id]
                total -= _tokens(call)
                call.forget()


def _tokens(call: SampleCall) -> int:
    return sum(len(completion.token_ids) for completion in call.completions)


def owner_of(request_id: str) -> str:
    """The job that asked, `jobs/{job}`; empty where none is known."""
    return request_id.partition(OWNER)[0] if request_id.startswith("jobs/") else ""


def _given(request_id: str) -> str:
    """The id as its job gave it."""
    return request_id.partition(OWNER)[2] if request_id.startswith("jobs/") else request_id
