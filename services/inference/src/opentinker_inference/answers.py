"""What came of a request, as the messages of Sample and of StreamSample.

The last completion carries the engine's time, which is known only when the request has ended; so it waits for
that.
"""

from collections.abc import AsyncIterator, Callable

from opentinker_inference import wire, wire_completions
from opentinker_inference.adapters.tokenizer import ModelTokenizer
from opentinker_inference.domain.requests import SampleCall
from opentinker_inference.domain.sampling import Completion, Delta, PromptScores, cut_at_stop
from opentinker_inference.domain.streamed_text import StreamedText
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.tensors import pack_floats


class Answers:
    """Messages for one caller of one request."""

    def __init__(
        self, call: SampleCall, tokenizer: ModelTokenizer, keep_alive_s: float, queued: Callable[[], int]
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._keep_alive_s = keep_alive_s
        self._queued = queued
        self._texts: dict[int, StreamedText] = {}

    async def whole(self) -> AsyncIterator[pb.SampleResponse]:
        """Each completion when it has finished."""
        yield pb.SampleResponse(started=self._started())
        held: pb.SampleResponse | None = None
        async for event in self._call.follow(self._keep_alive_s):
            if event is None:
                yield pb.SampleResponse(keep_alive=pb.KeepAlive(queued=self._queued()))
            elif isinstance(event, PromptScores):
                yield pb.SampleResponse(prompt_logprobs=_scores_pb(event))
            elif isinstance(event, Completion):
                if held is not None:
                    yield held
                held = pb.SampleResponse(completion=self._finished(event))
                if self._call.missing:
                    yield held
                    held = None
            elif not isinstance(event, Delta) and held is not None:
                held.engine_time.CopyFrom(wire.duration(event.engine_s))
                yield held

    async def streamed(self) -> AsyncIterator[pb.StreamSampleResponse]:
        """Deltas, and each completion after its last one."""
        yield pb.StreamSampleResponse(started=self._started())
        held: pb.StreamSampleResponse | None = None
        async for event in self._call.follow(self._keep_alive_s, deltas=True):
            if event is None:
                yield pb.StreamSampleResponse(keep_alive=pb.KeepAlive(queued=self._queued()))
            elif isinstance(event, PromptScores):
                yield pb.StreamSampleResponse(prompt_logprobs=_scores_pb(event))
            elif isinstance(event, Delta):
                text = self._text(event.index).add(event.token_ids)
                spec = self._call.spec
                # Under which version a request that may continue goes on is said with its completion.
                message = wire_completions.delta_pb(event, None if spec.may_continue else spec.model, text)
                yield pb.StreamSampleResponse(delta=message)
            elif isinstance(event, Completion):
                if held is not None:
                    yield held
                finished = self._finished(event)
                rest = self._text(event.index).rest(finished.text)
                if rest:
                    last = sampling_pb2.CompletionDelta(index=event.index, text=rest)
                    yield pb.StreamSampleResponse(delta=last)
                held = pb.StreamSampleResponse(completion=finished)
                if self._call.missing:
                    yield held
                    held = None
            elif held is not None:
                held.engine_time.CopyFrom(wire.duration(event.engine_s))
                yield held

    def _text(self, index: int) -> StreamedText:
        text = self._texts.get(index)
        if text is None:
            text = self._texts[index] = StreamedText(self._tokenizer, self._call.params.stop)
        return text

    def _started(self) -> sampling_pb2.EffectiveParams:
        return sampling_pb2.EffectiveParams(
            params=wire.sampling_params_pb(self._call.params),
            prompt_tokens=len(self._call.spec.prompt),
            cached_prompt_tokens=self._call.cached_prompt_tokens,
        )

    def _finished(self, completion: Completion) -> sampling_pb2.Completion:
        params = self._call.params
        text = cut_at_stop(
            self._tokenizer.text(completion.token_ids),
            completion.matched_stop,
            params.include_stop_in_output,
        )
        return wire_completions.finished_pb(
            completion, text, params.seed + completion.index, self._call.spec.model
        )


def _scores_pb(scores: PromptScores) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(logprobs=pack_floats(scores.logprobs))
