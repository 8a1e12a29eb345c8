"""Sampling between the gateway's values and the inference service's messages."""

from collections.abc import Sequence
from dataclasses import fields

from opentinker_gateway.domain.sampling import (
    Alternative,
    Delta,
    Finished,
    PromptScores,
    SamplingOptions,
    Started,
    StopReason,
    Support,
    Tokens,
)
from opentinkerapi.data.v1 import prompt_pb2, tensor_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.runtime.tensors import pack_ids, unpack, unpack_floats, unpack_ids

_STOP_REASONS = {
    sampling_pb2.STOP_REASON_END: StopReason.END,
    sampling_pb2.STOP_REASON_STOP: StopReason.STOP,
    sampling_pb2.STOP_REASON_LENGTH: StopReason.LENGTH,
    sampling_pb2.STOP_REASON_CANCELLED: StopReason.CANCELLED,
}


def params_pb(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Every option that was given."""
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    given["logit_bias"] = dict(options.logit_bias)
    return sampling_pb2.SamplingParams(**{name: value for name, value in given.items() if value is not None})


def prompt_pb(ids: Sequence[int]) -> prompt_pb2.Prompt:
    """A prompt of token ids."""
    return prompt_pb2.Prompt(
        chunks=[prompt_pb2.Chunk(tokens=prompt_pb2.TokenChunk(token_ids=pack_ids(list(ids))))]
    )


def started(message: sampling_pb2.EffectiveParams) -> Started:
    return Started(message.prompt_tokens, message.cached_prompt_tokens, message.params.temperature)


def delta(message: sampling_pb2.CompletionDelta) -> Delta:
    top = _top(message.top_token_ids, message.top_logprobs, message.HasField("top_token_ids"))
    return Delta(message.index, message.text, _tokens(message.token_ids, message.logprobs, top))


def finished(message: sampling_pb2.Completion) -> Finished:
    top = _top(message.top_token_ids, message.top_logprobs, message.HasField("top_token_ids"))
    return Finished(
        index=message.index,
        text=message.text,
        tokens=_tokens(message.token_ids, message.logprobs, top),
        stop_reason=_STOP_REASONS.get(message.stop_reason, StopReason.LENGTH),
        matched_stop=message.matched_stop,
        spans=tuple((span.start, span.end, span.version) for span in message.version_spans),
        support=Support(
            tuple(unpack_ids(message.support_sizes)), tuple(unpack_ids(message.support_token_ids))
        ),
    )


def prompt_scores(message: inference_service_pb2.PromptLogprobs) -> PromptScores:
    return PromptScores(tuple(unpack_floats(message.logprobs).tolist()))


def _tokens(ids: bytes, logprobs: bytes, top: tuple[tuple[Alternative, ...], ...]) -> Tokens:
    return Tokens(tuple(unpack_ids(ids)), tuple(unpack_floats(logprobs).tolist()), top)


def _top(
    ids: tensor_pb2.Tensor, logprobs: tensor_pb2.Tensor, given: bool
) -> tuple[tuple[Alternative, ...], ...]:
    if not given:
        return ()
    rows = zip(unpack(ids).tolist(), unpack(logprobs).tolist(), strict=True)
    return tuple(tuple(Alternative(i, x) for i, x in zip(*row, strict=True)) for row in rows)
