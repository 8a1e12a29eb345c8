"""Asks the inference service for completions, and for scores of given tokens.

A Sample that breaks off is sent again under the same request id: completions that had arrived are not given
twice, those that had finished are kept by the server, the rest are drawn again from the same seeds. Where its
server died and there are replicas, it goes to another at once; under a request that takes servers along one
after the other, no more than MAX_CRASHES die.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, answer, stream
from opentinker.connection.jobs import Link, Role
from opentinker.connection.on_demand import Slots
from opentinker.sampling.completion import Completion, Delta, Floats, prompt_scores
from opentinker.sampling.meter import EngineMeter
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.prompt import Uploads, chunks, images_of, upload_large
from opentinker.sampling.reading import Reading
from opentinkerapi.data.v1 import prompt_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.tensors import unpack_floats

ACK_BATCH = 512

OnSwap: TypeAlias = Literal["drain", "continue"]
"""What becomes of a running request when its server, which merges one version at a time, gets another
version of the policy: it ends under the one that it names, or goes on under the other. For "continue" the
swap and the requests must both say so; the spans of a completion tell which version sampled what.
"""
_SWAPS = {
    "drain": sampling_pb2.SWAP_POLICY_DRAIN,
    "continue": sampling_pb2.SWAP_POLICY_CONTINUE,
}

MAX_CRASHES = 3
"""How often an engine or its server may die under one request before the request is to blame."""


class CompletionSource(Protocol):
    """What rollouts sample from: the port of the agent loop towards inference."""

    def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        version: int,
        params: SamplingParams,
        n: int,
        seed: int | None,
        request_id: str,
        meter: EngineMeter | None = None,
        conversation: str = "",
    ) -> AsyncGenerator[Completion, None]:
        """Yield n completions as they finish, each index once. Completion i is drawn from seed + i.

        Requests of the same `conversation` go to the server that has its prefix.
        """
        ...


class Sampler:
    """Completions of one policy through its job's inference slot. Runs on the client's loop."""

    def __init__(self, job: Slots, policy: str, uploads: Uploads) -> None:
        self._job = job
        self._uploads = uploads
        self._policy = policy
        self._acks: set[asyncio.Task[None]] = set()

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        version: int,
        params: SamplingParams,
        n: int,
        seed: int | None,
        request_id: str,
        meter: EngineMeter | None = None,
        conversation: str = "",
        on_swap: OnSwap = "drain",
    ) -> AsyncGenerator[Completion, None]:
        """Yield n completions as they finish, each index once. Completion i is drawn from seed + i.

        Raises PromptTooLong, and whatever else the service refuses; waits where the server is away.
        """
        arrived: set[int] = set()
        scores: Floats | None = None
        prompt = _prompt(prompt_ids)
        await upload_large(prompt.chunks, self._uploads)

        def ask(link: Link) -> AsyncIterable[Any]:
            request = self._request(link, prompt, version, params, n, seed, request_id, on_swap)
            return InferenceServiceStub(link.channel).Sample(request)

        answers = self._answers(ask, lambda: n - len(arrived), request_id, conversation, meter)
        async with contextlib.aclosing(answers):
            async for response in answers:
                event = response.WhichOneof("event")
                if event == "prompt_logprobs":
                    scores = prompt_scores(response.prompt_logprobs)
                elif event == "completion" and response.completion.index not in arrived:
                    arrived.add(response.completion.index)
                    yield Completion.of_wire(response.completion, scores)

    async def sample_tokens(
        self,
        prompt_ids: Sequence[int],
        *,
        version: int,
        params: SamplingParams,
        n: int,
        seed: int | None,
        request_id: str,
        conversation: str = "",
        on_swap: OnSwap = "drain",
    ) -> AsyncGenerator[Delta | Completion, None]:
        """As `sample`, and before each completion its tokens as they are sampled.

        A stream that breaks off is taken up where it was. Where the server was lost and another one sampled
        other tokens than those that were given, that cannot be: Unavailable, with reason CONNECTION_LOST.
        """
        reading = Reading()
        scores: Floats | None = None
        prompt = _prompt(prompt_ids)
        await upload_large(prompt.chunks, self._uploads)

        def ask(link: Link) -> AsyncIterable[Any]:
            reading.begin()
            request = self._request(link, prompt, version, params, n, seed, request_id, on_swap)
            streamed = inference_service_pb2.StreamSampleRequest(sample=request)
            return InferenceServiceStub(link.channel).StreamSample(streamed)

        answers = self._answers(ask, lambda: n - len(reading.finished), request_id, conversation, None)
        async with contextlib.aclosing(answers):
            async for response in answers:
                event = response.WhichOneof("event")
                if event == "prompt_logprobs":
                    scores = prompt_scores(response.prompt_logprobs)
                elif event == "delta":
                    if (delta := reading.delta(Delta.of_wire(response.delta))) is not None:
                        yield delta
                elif event == "completion":
                    completion = Completion.of_wire(response.completion, scores)
                    if reading.completion(completion):
                        yield completion

    async def _answers(
        self,
        ask: Callable[[Link], Any],
        left: Callable[[], int],
        request_id: str,
        conversation: str,
        meter: EngineMeter | None,
    ) -> AsyncGenerator[Any, None]:
        """The messages of a call, and of those that take it up where it broke off, until there is no
        completion `left`.
        """
        crashes = 0
        link: Link | None = None
        try:
            while left():
                failure: errors.OpenTinkerError | None = None
                begun = False
                async with self._job.routed(Role.INFERENCE, conversation, left()) as link:
                    call = ask(link)
                    try:
                        async for response in stream(call):
                            begun = True
                            if response.HasField("engine_time") and meter is not None:
                                meter.add(response.engine_time.ToTimedelta().total_seconds())
                            yield response
                        if left():
                            raise errors.Unavailable(
                                f"the answers ended with {left()} completions missing",
                                reason=errors.Reason.CONNECTION_LOST,
                            )
                    except (errors.Unavailable, errors.StaleAttempt) as error:
                        failure = error
                    except errors.Overloaded as error:
                        await asyncio.sleep(error.retry_after_s or PAUSE_S)
                    finally:
                        call.cancel()
                if failure is not None:
                    crashes += _died(failure, begun)
                    if crashes > MAX_CRASHES:
                        raise failure
                    await self._job.recover(link, failure)
            self._job.answered(link)
        finally:
            if left() and link is not None:
                self._background(self._cancel(link, request_id))

    def acknowledge(self, request_ids: Sequence[str]) -> None:
        """Let the server drop completions that have been received; in the background, a hint only."""
        for start in range(0, len(request_ids), ACK_BATCH):
            self._background(self._acknowledge(list(request_ids[start : start + ACK_BATCH])))

    async def load(self, version: int, on_swap: OnSwap = "drain") -> float:
        """Load a version before it is sampled, on every replica; returns the seconds spent in an engine."""

        async def call(link: Link) -> inference_service_pb2.LoadPolicyVersionResponse:
            request = inference_service_pb2.LoadPolicyVersionRequest(
                policy_version=self._version(version),
                job_token=link.job_token,
                swap_policy=_swap(on_swap),
            )
            return await answer(InferenceServiceStub(link.channel).LoadPolicyVersion(request))

        responses = await self._job.everywhere(Role.INFERENCE, call)
        return max(response.load_time.ToTimedelta().total_seconds() for response in responses)

    async def score(
        self, sequences: Sequence[Sequence[int]], *, version: int, temperature: float
    ) -> list[NDArray[np.float32]]:
        """Raw logprobs of given tokens: one array [n] for each sequence of n ids; entry 0 is NaN."""

        prompts = [_prompt(ids) for ids in sequences]
        for prompt in prompts:
            await upload_large(prompt.chunks, self._uploads)

        async def call(link: Link) -> inference_service_pb2.ScoreTokensResponse:
            request = inference_service_pb2.ScoreTokensRequest(
                model=sampling_pb2.ModelRef(policy_version=self._version(version)),
                sequences=prompts,
                temperature=temperature,
                attempt=link.attempt,
                job_token=link.job_token,
            )
            return await answer(InferenceServiceStub(link.channel).ScoreTokens(request))

        response = await self._job.through(Role.INFERENCE, call)
        return [unpack_floats(scores.logprobs) for scores in response.scores]

    async def capabilities(self) -> inference_service_pb2.GetCapabilitiesResponse:
        """What the inference server offers."""

        async def call(link: Link) -> inference_service_pb2.GetCapabilitiesResponse:
            request = inference_service_pb2.GetCapabilitiesRequest()
            return await answer(InferenceServiceStub(link.channel).GetCapabilities(request))

        return await self._job.through(Role.INFERENCE, call)

    async def close(self) -> None:
        """Wait for what goes on in the background."""
        await asyncio.gather(*self._acks, return_exceptions=True)

    def _request(
        self,
        link: Link,
        prompt: prompt_pb2.Prompt,
        version: int,
        params: SamplingParams,
        n: int,
        seed: int | None,
        request_id: str,
        on_swap: OnSwap,
    ) -> inference_service_pb2.SampleRequest:
        return inference_service_pb2.SampleRequest(
            request_id=request_id,
            model=sampling_pb2.ModelRef(policy_version=self._version(version)),
            prompt=prompt,
            params=params.to_wire(seed),
            n=n,
            attempt=link.attempt,
            job_token=link.job_token,
            swap_policy=_swap(on_swap),
        )

    def _version(self, version: int) -> sampling_pb2.PolicyVersionRef:
        return sampling_pb2.PolicyVersionRef(policy=self._policy, version=version)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)

    async def _acknowledge(self, request_ids: list[str]) -> None:
        with contextlib.suppress(errors.OpenTinkerError):
            # To every replica: a request may have been at two of them; ids that are not held are no fault.
            for link in await self._job.links(Role.INFERENCE):
                request = inference_service_pb2.AckCompletionsRequest(
                    request_ids=request_ids, job_token=link.job_token
                )
                await answer(InferenceServiceStub(link.channel).AckCompletions(request, timeout=5))

    async def _cancel(self, link: Link, request_id: str) -> None:
        with contextlib.suppress(errors.OpenTinkerError):
            request = inference_service_pb2.CancelSampleRequest(
                request_id=request_id, job_token=link.job_token
            )
            await answer(InferenceServiceStub(link.channel).CancelSample(request, timeout=5))


def _died(error: errors.OpenTinkerError, begun: bool) -> bool:
    """Whether a request that failed so may have been the end of an engine, or of its server."""
    lost = begun and error.reason == errors.Reason.CONNECTION_LOST
    return lost or error.reason == errors.Reason.ENGINE_CRASHED


def _swap(on_swap: str) -> sampling_pb2.SwapPolicy.ValueType:
    if on_swap not in _SWAPS:
        raise errors.invalid("on_swap", f"must be 'drain' or 'continue', not {on_swap!r}")
    return _SWAPS[on_swap]


def _prompt(ids: Sequence[int]) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(chunks=chunks(ids, images_of(ids)))
