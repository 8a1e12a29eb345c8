"""The rules of sampling and scoring, above engines, stores and the wire."""

import asyncio
import dataclasses
import itertools
import secrets

import structlog

from opentinker_inference.domain.images import Images
from opentinker_inference.domain.leases import Leases
from opentinker_inference.domain.requests import RequestBook, SampleCall, SampleSpec, owner_of
from opentinker_inference.domain.residency import AdapterResidency, MergedResidency, Residency
from opentinker_inference.domain.sampling import (
    MAX_COMPLETIONS,
    MAX_SEED,
    Completion,
    EngineInfo,
    SampleJob,
    SamplingParams,
    ScoreJob,
    check_params,
    check_supported,
    check_tokens,
    fit_to_context,
)
from opentinker_inference.domain.tally import Tally
from opentinker_inference.domain.versions import LocalWeights, ModelRef
from opentinker_inference.ports import EngineHost, VersionStore, Weights
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.metering import TokenMeter
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_TRIES = 2
"""A request that was running when the engine died is tried once more here, then by its caller."""
_MAX_SCORED_TOKENS = 1_000_000


class InferenceDomain:
    """One base model, the versions of its policies, and the requests for them."""

    def __init__(
        self,
        *,
        base_model: str,
        end_token_ids: tuple[int, ...],
        engine: EngineHost,
        store: VersionStore,
        clock: Clock,
        max_pending: int,
    ) -> None:
        self.base_model = base_model
        self.end_token_ids = end_token_ids
        self.book = RequestBook(clock)
        self.leases = Leases()
        self.tally = Tally()
        self.meter = TokenMeter()
        self._engine = engine
        self._store = store
        self._clock = clock
        self._max_pending = max_pending
        self._residency: Residency | None = None
        self._runs = itertools.count()
        self._draining = False
        engine.on_started(self._engine_started)

    @property
    def info(self) -> EngineInfo:
        """What the engine offers; SERVER_STARTING before it first started."""
        return self._engine.info()

    @property
    def residency(self) -> Residency:
        if self._residency is None:
            raise ServiceError(Reason.SERVER_STARTING, retry_after_s=1.0)
        return self._residency

    def queued(self) -> int:
        """Requests that wait for their version to be loaded."""
        return self._residency.waiting() if self._residency is not None else 0

    def start_draining(self) -> None:
        """Take no new requests; those running go on."""
        self._draining = True

    # Sampling

    def submit(self, spec: SampleSpec, within_s: float | None = None) -> SampleCall:
        """Join the request of this id, or begin it. Raises for everything that is wrong with it.

        `within_s` is how long the caller waits; when nobody waits any more, the request ends.
        """
        call = self.book.find(spec)
        if call is not None and (not call.finished or call.error is None):
            call.wait_for(within_s)
            return call
        self._check_open()
        if call is not None:
            call.restart()
        else:
            call = self.book.open(spec, self._effective(spec))
        call.stream = call.stream or spec.stream
        call.wait_for(within_s)
        call.task = asyncio.create_task(self._run(call), name=f"sample {spec.request_id}")
        return call

    def cancel(self, request_id: str) -> None:
        """End a running request; a finished one stays. REQUEST_NOT_FOUND if there is none."""
        call = self.book.get(request_id)
        if call.task is not None and not call.finished:
            call.task.cancel()

    async def score(
        self,
        model: ModelRef,
        sequences: tuple[tuple[int, ...], ...],
        temperature: float,
        images: tuple[Images, ...] = (),
    ) -> list[list[float]]:
        """Logprob of each token of each sequence; entry 0 is NaN. `images` are those of each sequence."""
        self._check_open()
        self._check_model(model)
        info = self.info
        for index, sequence in enumerate(sequences):
            check_tokens(sequence, info.vocab_size, f"sequences[{index}]")
            if len(sequence) > info.context_tokens:
                raise ServiceError(
                    Reason.PROMPT_TOO_LONG,
                    f"sequences[{index}] has {len(sequence)} tokens, the context holds {info.context_tokens}",
                    field=f"sequences[{index}]",
                    metadata={"prompt_tokens": len(sequence), "context_tokens": info.context_tokens},
                )
        if sum(map(len, sequences)) > _MAX_SCORED_TOKENS:
            text = f"more than {_MAX_SCORED_TOKENS} tokens in one call; split it"
            raise ServiceError(Reason.INVALID_FIELD, text, field="sequences")
        if not 0.01 <= temperature <= 2:
            text = "temperature must be in [0.01, 2]"
            raise ServiceError(Reason.INVALID_FIELD, text, field="temperature")
        if temperature != 1.0 and not info.score_temperature:
            text = f"the {info.engine} engine scores at temperature 1 only"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="temperature")
        for tries in range(_TRIES):
            await self._engine.wait_started()
            try:
                async with self.residency.use(model) as key:
                    job = ScoreJob(f"score-{next(self._runs)}", key, sequences, temperature, images)
                    scores = await self._engine.score(job)
                    self.tally.scored_tokens += sum(map(len, sequences))
                    return scores
            except ServiceError as error:
                _raise_unless_again(error, tries)
        raise AssertionError("unreachable")

    # Versions

    async def load_version(self, ref: ModelRef, *, may_continue: bool = False) -> float:
        """Load ahead of use; seconds spent in the engine."""
        self._check_open()
        if may_continue:
            self._check_continues(ref)
        await self._engine.wait_started()
        return await self.residency.load(ref, may_continue=may_continue)

    async def unload_version(self, ref: ModelRef) -> None:
        """Drop a version once nobody uses it. VERSION_NOT_FOUND if it is not loaded."""
        await self._engine.wait_started()
        await self.residency.unload(ref)

    async def prefetch(self, ref: ModelRef) -> None:
        """Bring a version's files here, if its policy was sampled here before. A hint: failing is logged."""
        if not self._store.knows(ref.policy):
            return
        try:
            await self._store.fetch(ref)
        except ServiceError as error:
            log.info(
                "prefetch failed; the version loads when it is asked for", version=str(ref), error=str(error)
            )

    # Inside

    def _engine_started(self, info: EngineInfo) -> None:
        if self._residency is not None:
            self._residency.reset()
        elif info.serving_mode == "merged":
            self._residency = MergedResidency(self._store.hold, self._load)
        else:
            self._residency = AdapterResidency(
                self._store.hold, self._load, self._engine.unload, info.max_resident_versions
            )

    async def _load(self, key: str, weights: LocalWeights | None) -> float:
        if weights is None:
            return await self._engine.load(Weights(key, None))
        if weights.full and self.info.serving_mode != "merged":
            raise ServiceError(
                Reason.UNSUPPORTED_COMBINATION,
                f"{key} replaces every weight of the model, and this server serves adapters beside the base; "
                "use one with serving_mode=merged",
                field="model",
            )
        return await self._engine.load(Weights(key, weights.directory, full=weights.full))

    def _check_open(self) -> None:
        if self._draining:
            raise ServiceError(Reason.DRAINING, retry_after_s=1.0)
        if self.book.running >= self._max_pending:
            text = f"{self._max_pending} requests are waiting already"
            raise ServiceError(Reason.OVERLOADED, text, retry_after_s=1.0)

    def _check_model(self, ref: ModelRef) -> None:
        if ref.is_base and ref.base_model != self.base_model:
            raise ServiceError(
                Reason.UNKNOWN_MODEL,
                f"this server serves {self.base_model!r}, not {ref.base_model!r}",
                field="model.base_model",
            )

    def _check_continues(self, ref: ModelRef) -> None:
        """UNSUPPORTED_OPTION unless running requests can go on under other versions of the policy."""
        info = self.info
        text = ""
        if not info.continues:
            text = f"the {info.engine} engine, serving {info.serving_mode}, does not offer CONTINUE"
        elif ref.is_base or ref.checkpoint:
            text = f"{ref} has no other version under which a request could CONTINUE"
        if text:
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="swap_policy")

    def _effective(self, spec: SampleSpec) -> SamplingParams:
        self._check_model(spec.model)
        info = self.info
        if spec.may_continue:
            self._check_continues(spec.model)
            if spec.params.prompt_logprobs:
                text = "prompt_logprobs are of one version, so they do not go with CONTINUE"
                raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="swap_policy")
        if not 1 <= spec.n <= MAX_COMPLETIONS:
            raise ServiceError(Reason.INVALID_FIELD, f"n must be in [1, {MAX_COMPLETIONS}]", field="n")
        check_tokens(spec.prompt, info.vocab_size, "prompt")
        params = spec.params
        if not spec.seed_given:
            params = dataclasses.replace(params, seed=secrets.randbelow(MAX_SEED >> 16))
        if spec.max_tokens_given and params.max_tokens < 1:
            text = "max_tokens must be at least 1"
            raise ServiceError(Reason.INVALID_FIELD, text, field="params.max_tokens")
        params = fit_to_context(params, len(spec.prompt), info.context_tokens)
        check_params(params, info.vocab_size)
        check_supported(params, (*info.sampling_fields, "include_stop_in_output"), info.engine)
        return params

    async def _run(self, call: SampleCall) -> None:
        error: ServiceError | None = None
        before = len(call.completions)
        try:
            async with call.limited():
                for tries in range(_TRIES):
                    try:
                        await self._run_once(call)
                        break
                    except ServiceError as failure:
                        _raise_unless_again(failure, tries)
        except ServiceError as failure:
            error = failure
        except asyncio.CancelledError:
            error = ServiceError(Reason.CANCELLED, "the request was cancelled")
        except Exception:
            request_id = call.spec.request_id
            log.exception("a request failed unexpectedly", request_id=request_id, job=owner_of(request_id))
            error = ServiceError(Reason.INTERNAL)
        call.finish(self._clock.monotonic(), error)
        self.tally.ended(call, before)
        if call.acknowledged or (error is not None and not call.completions):
            self.book.drop(call.spec.request_id)

    async def _run_once(self, call: SampleCall) -> None:
        await self._engine.wait_started()
        async with self.residency.use(call.spec.model, may_continue=call.spec.may_continue) as key:
            if not call.missing:
                return
            job = SampleJob(
                # A name of its own for each try: the engine may still be ending an earlier one.
                request_id=f"{call.spec.request_id}#{next(self._runs)}",
                weights=key,
                prompt=call.spec.prompt,
                indices=call.missing,
                params=call.params,
                end_token_ids=self.end_token_ids,
                images=call.spec.images,
                may_continue=call.spec.may_continue,
                stream=call.stream,
            )
            async for event in self._engine.sample(job):
                call.add(event)
                if isinstance(event, Completion):
                    self.meter.sampled(owner_of(call.spec.request_id), len(event.token_ids))


def _raise_unless_again(error: ServiceError, tries: int) -> None:
    """Go on only if the engine died under a first try: the next one waits for a new engine."""
    if error.reason is not Reason.ENGINE_CRASHED or tries + 1 >= _TRIES:
        raise error
