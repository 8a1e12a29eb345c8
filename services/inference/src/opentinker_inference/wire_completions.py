"""Completions, whole and in parts, between protos and domain."""

from collections.abc import Iterable

import numpy as np

from opentinker_inference.domain.sampling import Completion, Delta, StopReason
from opentinker_inference.domain.versions import ModelRef, VersionSpan
from opentinkerapi.data.v1 import prompt_pb2, tensor_pb2
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.tensors import pack, pack_floats, pack_ids, unpack, unpack_floats, unpack_ids

_STOP_REASONS = {
    StopReason.END: sampling_pb2.STOP_REASON_END,
    StopReason.STOP: sampling_pb2.STOP_REASON_STOP,
    StopReason.LENGTH: sampling_pb2.STOP_REASON_LENGTH,
    StopReason.CANCELLED: sampling_pb2.STOP_REASON_CANCELLED,
}
_STOP_REASON_OF = {code: reason for reason, code in _STOP_REASONS.items()}


def completion_pb(completion: Completion) -> sampling_pb2.Completion:
    """A completion as it leaves an engine: without text, seed and version."""
    message = sampling_pb2.Completion(
        index=completion.index,
        token_ids=pack_ids(completion.token_ids),
        logprobs=pack_floats(completion.logprobs),
        stop_reason=_STOP_REASONS[completion.stop_reason],
        matched_stop=completion.matched_stop,
    )
    for span in completion.spans:
        message.version_spans.add(start=span.start, end=span.end, version=span.version)
    _add_extras(message, completion)
    return message


def finished_pb(completion: Completion, text: str, seed: int, ref: ModelRef) -> sampling_pb2.Completion:
    """A completion as a caller gets it. Without spans of its own the version asked for sampled all of it."""
    message = completion_pb(completion)
    message.text = text
    message.seed = seed
    if not completion.spans:
        message.version_spans.extend(spans_pb(ref, 0, len(completion.token_ids)))
    return message


def completion(message: sampling_pb2.Completion) -> Completion:
    ids = tuple(unpack_ids(message.token_ids))
    top_ids, top_logprobs = tops(message)
    return Completion(
        index=message.index,
        token_ids=ids,
        logprobs=tuple(unpack_floats(message.logprobs).tolist()),
        stop_reason=_STOP_REASON_OF[message.stop_reason],
        matched_stop=message.matched_stop,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        support_sizes=tuple(unpack_ids(message.support_sizes)),
        support_ids=tuple(unpack_ids(message.support_token_ids)),
        raw_logprobs=tuple(unpack_floats(message.raw_logprobs).tolist()),
        spans=tuple(VersionSpan(span.start, span.end, span.version) for span in message.version_spans),
    )


def delta_pb(delta: Delta, ref: ModelRef | None = None, text: str = "") -> sampling_pb2.CompletionDelta:
    """New tokens; on the way to a caller (`ref`) with text, and the version that sampled them."""
    message = sampling_pb2.CompletionDelta(
        index=delta.index,
        token_ids=pack_ids(delta.token_ids),
        logprobs=pack_floats(delta.logprobs),
        text=text,
        version_spans=spans_pb(ref, delta.start, len(delta.token_ids)) if ref is not None else (),
    )
    if delta.top_ids:
        ids, logprobs = tops_pb(delta.top_ids, delta.top_logprobs)
        message.top_token_ids.CopyFrom(ids)
        message.top_logprobs.CopyFrom(logprobs)
    return message


def delta(message: sampling_pb2.CompletionDelta, start: int) -> Delta:
    """New tokens as an engine says them, from place `start` on."""
    ids = tuple(unpack_ids(message.token_ids))
    top_ids, top_logprobs = tops(message)
    return Delta(
        message.index, start, ids, tuple(unpack_floats(message.logprobs).tolist()), top_ids, top_logprobs
    )


def spans_pb(ref: ModelRef, start: int, count: int) -> list[prompt_pb2.VersionSpan]:
    """The version asked for sampled `count` tokens from `start` on; the base model has no versions."""
    if ref.is_base or not count:
        return []
    return [prompt_pb2.VersionSpan(start=start, end=start + count, version=ref.version)]


def tops_pb(
    ids: tuple[tuple[int, ...], ...], logprobs: tuple[tuple[float, ...], ...]
) -> tuple[tensor_pb2.Tensor, tensor_pb2.Tensor]:
    """Tables [tokens][k] as tensors."""
    return pack(np.asarray(ids, dtype=np.int32)), pack(np.asarray(logprobs, dtype=np.float32))


def tops(
    message: sampling_pb2.Completion | sampling_pb2.CompletionDelta,
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """The tables of the likeliest tokens and their logprobs; empty where they were not asked for."""
    return tuple(tuple(int(i) for i in row) for row in _rows(message, "top_token_ids")), tuple(
        tuple(row) for row in _rows(message, "top_logprobs")
    )


def _rows(
    message: sampling_pb2.Completion | sampling_pb2.CompletionDelta, name: str
) -> Iterable[list[float]]:
    if not message.HasField(name):  # type: ignore[arg-type]
        return ()
    rows: list[list[float]] = unpack(getattr(message, name)).tolist()
    return rows


def _add_extras(message: sampling_pb2.Completion, completion: Completion) -> None:
    """Fill in what was asked for beside tokens and logprobs."""
    if completion.top_ids:
        ids, logprobs = tops_pb(completion.top_ids, completion.top_logprobs)
        message.top_token_ids.CopyFrom(ids)
        message.top_logprobs.CopyFrom(logprobs)
    if completion.support_sizes:
        message.support_sizes = pack_ids(completion.support_sizes)
        message.support_token_ids = pack_ids(completion.support_ids)
    if completion.raw_logprobs:
        message.raw_logprobs = pack_floats(completion.raw_logprobs)
