"""An inference service without a model: a reply is a function of version, seed and prompt length."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from client.tests.doubles.tokenizers import files
from client.tests.doubles.trainer import abort

from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceServicer
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import ChatTokenizer
from opentinkerapi.runtime.tensors import pack, pack_floats, pack_ids, unpack_floats, unpack_ids

Speak = Callable[[int, int, list[int]], str]
"""(version, seed, prompt ids) -> reply."""


def digits(version: int, seed: int, prompt: list[int]) -> str:
    """A two-digit number that depends on everything."""
    number = hashlib.sha256(f"{version} {seed} {len(prompt)}".encode()).digest()[0] % 100
    return f"{number}"


def in_pairs(ids: list[int]) -> tuple[bytes, bytes]:
    """Each token and the one after it in the vocabulary."""
    return pack_ids([2] * len(ids)), pack_ids([each for token in ids for each in (token, token + 1)])


class InferenceDouble(InferenceServiceServicer):
    """`fail_after` = k makes each Sample break off after k completions, once for each request id."""

    def __init__(self, tokenizer: dict[str, bytes] | None = None, speak: Speak = digits) -> None:
        self.files = tokenizer if tokenizer is not None else files()
        self.tokenizer = ChatTokenizer(self.files)
        self.speak = speak
        self.address = ""
        self.requests: list[inference_service_pb2.SampleRequest] = []
        self.acknowledged: list[str] = []
        self.cancelled: list[str] = []
        self.loaded: list[int] = []
        self.swaps: list[int] = []
        self.fetched = 0
        self.fail_after: int | None = None
        self.broken: set[str] = set()
        self.always_fails = False
        self.break_text_after: int | None = None
        self.pause_s = 0.0
        """Between the characters of a stream."""
        self.before: Callable[[Any, Any], Any] | None = None
        self.context_tokens = 4096
        self.end = True
        self.support: Callable[[list[int]], tuple[bytes, bytes]] = in_pairs
        """ids -> (sizes, sets), where it is asked for what they were chosen among."""

    async def Sample(
        self, request: inference_service_pb2.SampleRequest, context: Any
    ) -> AsyncIterator[inference_service_pb2.SampleResponse]:
        self.requests.append(request)
        if self.before is not None:
            await self.before(request, context)
        prompt = unpack_ids(request.prompt.chunks[0].tokens.token_ids)
        yield inference_service_pb2.SampleResponse(
            started=sampling_pb2.EffectiveParams(prompt_tokens=len(prompt), params=request.params)
        )
        if request.params.prompt_logprobs:
            scores = inference_service_pb2.PromptLogprobs(logprobs=pack_floats([np.nan, -1.0]))
            yield inference_service_pb2.SampleResponse(prompt_logprobs=scores)
        for index in range(request.n):
            breaks = self.fail_after is not None and index >= self.fail_after
            if breaks and (self.always_fails or request.request_id not in self.broken):
                self.broken.add(request.request_id)
                await abort(context, Reason.ENGINE_CRASHED, "the engine died")
            await asyncio.sleep(0)
            response = inference_service_pb2.SampleResponse(
                completion=self._completion(request, prompt, index)
            )
            if index + 1 == request.n:
                response.engine_time.FromMilliseconds(5)
            yield response

    async def StreamSample(
        self, request: inference_service_pb2.StreamSampleRequest, context: Any
    ) -> AsyncIterator[inference_service_pb2.StreamSampleResponse]:
        """A delta a token, of one character. `break_text_after` = k breaks each stream off after k of them,
        once.
        """
        asked = request.sample
        self.requests.append(asked)
        if self.before is not None:
            await self.before(asked, context)
        if asked.params.prompt_logprobs:
            scores = inference_service_pb2.PromptLogprobs(logprobs=pack_floats([np.nan, -1.0]))
            yield inference_service_pb2.StreamSampleResponse(prompt_logprobs=scores)
        for index in range(asked.n):
            prompt = unpack_ids(asked.prompt.chunks[0].tokens.token_ids)
            completion = self._completion(asked, prompt, index)
            ids, logprobs = unpack_ids(completion.token_ids), unpack_floats(completion.logprobs)
            for count in range(max(len(completion.text), len(ids))):
                breaks = count == self.break_text_after
                if breaks and (self.always_fails or asked.request_id not in self.broken):
                    self.broken.add(asked.request_id)
                    await abort(context, Reason.ENGINE_CRASHED, "the engine died")
                part = slice(count, count + 1)
                delta = sampling_pb2.CompletionDelta(
                    index=index,
                    text=completion.text[part],
                    token_ids=pack_ids(ids[part]),
                    logprobs=pack_floats(logprobs[part]),
                )
                delta.version_spans.add(
                    start=count, end=count + 1, version=asked.model.policy_version.version
                )
                yield inference_service_pb2.StreamSampleResponse(delta=delta)
                await asyncio.sleep(self.pause_s)
            yield inference_service_pb2.StreamSampleResponse(completion=completion)

    def _completion(
        self, request: inference_service_pb2.SampleRequest, prompt: list[int], index: int
    ) -> sampling_pb2.Completion:
        version = request.model.policy_version.version
        seed = request.params.seed + index
        text = self.speak(version, seed, prompt)
        ids = self.tokenizer.encode(text)
        reason = sampling_pb2.STOP_REASON_LENGTH
        if self.end:
            ids, reason = [*ids, self.tokenizer.eos_ids[0]], sampling_pb2.STOP_REASON_END
        completion = sampling_pb2.Completion(
            index=index,
            token_ids=pack_ids(ids),
            logprobs=pack_floats(np.full(len(ids), -0.5)),
            stop_reason=reason,
            text=text,
            seed=seed,
        )
        if request.params.return_support:
            completion.support_sizes, completion.support_token_ids = self.support(ids)
        if request.params.raw_logprobs:
            completion.raw_logprobs = pack_floats(np.full(len(ids), -0.25))
        if request.params.top_logprobs:
            shape = (len(ids), request.params.top_logprobs)
            completion.top_token_ids.CopyFrom(pack(np.full(shape, 7, np.int32)))
            completion.top_logprobs.CopyFrom(pack(np.full(shape, -2.0, np.float32)))
        completion.version_spans.add(start=0, end=len(ids), version=version)
        return completion

    async def AckCompletions(self, request: inference_service_pb2.AckCompletionsRequest, context: Any) -> Any:
        self.acknowledged += request.request_ids
        return inference_service_pb2.AckCompletionsResponse()

    async def CancelSample(self, request: inference_service_pb2.CancelSampleRequest, context: Any) -> Any:
        self.cancelled.append(request.request_id)
        return inference_service_pb2.CancelSampleResponse()

    async def LoadPolicyVersion(
        self, request: inference_service_pb2.LoadPolicyVersionRequest, context: Any
    ) -> Any:
        self.loaded.append(request.policy_version.version)
        self.swaps.append(request.swap_policy)
        response = inference_service_pb2.LoadPolicyVersionResponse()
        response.load_time.FromMilliseconds(20)
        return response

    async def ScoreTokens(self, request: inference_service_pb2.ScoreTokensRequest, context: Any) -> Any:
        response = inference_service_pb2.ScoreTokensResponse()
        for sequence in request.sequences:
            count = len(unpack_ids(sequence.chunks[0].tokens.token_ids))
            response.scores.add(logprobs=pack_floats([float("nan")] + [-1.0] * (count - 1)))
        return response

    async def GetCapabilities(
        self, request: inference_service_pb2.GetCapabilitiesRequest, context: Any
    ) -> Any:
        return inference_service_pb2.GetCapabilitiesResponse(
            context_tokens=self.context_tokens, engine="double", dtype="float32"
        )

    async def GetTokenizer(
        self, request: inference_service_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[inference_service_pb2.GetTokenizerResponse]:
        by_digest = {hashlib.sha256(data).hexdigest(): (name, data) for name, data in self.files.items()}
        digest = hashlib.sha256("".join(sorted(by_digest)).encode()).hexdigest()
        if not request.sha256s:
            response = inference_service_pb2.GetTokenizerResponse(digest=digest)
            for sha256, (name, data) in by_digest.items():
                response.files.add(name=name, sha256=sha256, size_bytes=len(data))
            yield response
            return
        for sha256 in request.sha256s:
            self.fetched += 1
            name, data = by_digest[sha256]
            for offset in range(0, len(data), 1000):
                response = inference_service_pb2.GetTokenizerResponse(digest=digest)
                response.files.add(name=name, sha256=sha256, data=data[offset : offset + 1000], offset=offset)
                yield response
