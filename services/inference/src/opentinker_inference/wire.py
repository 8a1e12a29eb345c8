"""Between protos and domain: the only module that knows both. Used by the front and by engine children."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from opentinker_inference.domain.images import Images, PromptImage, PromptTokens
from opentinker_inference.domain.requests import SampleSpec
from opentinker_inference.domain.sampling import (
    Completion,
    EngineInfo,
    PromptScores,
    SampleDone,
    SampleEvent,
    SampleJob,
    SamplingParams,
    ScoreJob,
    StopReason,
)
from opentinker_inference.domain.versions import ModelRef, VersionSpan, check_policy_name, checkpoint_ref
from opentinker_inference.ports import EngineConfig, Weights
from opentinker_kit.errors import ServiceError
from opentinkerapi.data.v1 import content_pb2
from opentinkerapi.engine.v1 import inference_engine_pb2 as engine_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import pack, pack_floats, pack_ids, unpack, unpack_floats, unpack_ids

_STOP_REASONS = {
    StopReason.END: sampling_pb2.STOP_REASON_END,
    StopReason.STOP: sampling_pb2.STOP_REASON_STOP,
    StopReason.LENGTH: sampling_pb2.STOP_REASON_LENGTH,
    StopReason.CANCELLED: sampling_pb2.STOP_REASON_CANCELLED,
}
_STOP_REASON_OF = {code: reason for reason, code in _STOP_REASONS.items()}
_SCALARS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "include_stop_in_output",
    "top_logprobs",
    "prompt_logprobs",
    "return_support",
)


# Public requests


def sample_spec(request: inference_service_pb2.SampleRequest, prompt: PromptTokens) -> SampleSpec:
    """A Sample request, its prompt as it was read; INVALID_FIELD if it is malformed. Values are checked
    later, against the engine.
    """
    return SampleSpec(
        request_id=request.request_id,
        digest=request_digest(request),
        model=model_ref(request.model),
        prompt=prompt.ids,
        images=prompt.images,
        params=sampling_params(request.params),
        seed_given=request.params.HasField("seed"),
        max_tokens_given=request.params.HasField("max_tokens"),
        n=request.n if request.HasField("n") else 1,
        may_continue=may_continue(request.swap_policy),
    )


def request_digest(request: inference_service_pb2.SampleRequest) -> str:
    """Digest over what is asked for. A retry may come under a newer attempt or token."""
    body = inference_service_pb2.SampleRequest()
    body.CopyFrom(request)
    for name in ("attempt", "job_token", "conversation"):
        body.ClearField(name)
    return hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()


def model_ref(ref: sampling_pb2.ModelRef, field: str = "model") -> ModelRef:
    """Which weights; the base model's name stays in `base_model` for the service to check."""
    if ref.WhichOneof("model") == "policy_version":
        return version_ref(ref.policy_version, f"{field}.policy_version")
    if ref.WhichOneof("model") == "base_model":
        return ModelRef(base_model=ref.base_model)
    if ref.WhichOneof("model") == "checkpoint":
        return checkpoint_ref(ref.checkpoint, f"{field}.checkpoint")
    text = "name a policy_version, a checkpoint or the base_model"
    raise ServiceError(Reason.REQUIRED_FIELD, text, field=field)


def version_ref(ref: sampling_pb2.PolicyVersionRef, field: str = "policy_version") -> ModelRef:
    """A policy's version; INVALID_FIELD for a malformed name."""
    check_policy_name(ref.policy, f"{field}.policy")
    if ref.version < 0:
        raise ServiceError(Reason.INVALID_FIELD, "version is negative", field=f"{field}.version")
    return ModelRef(policy=ref.policy, version=ref.version)


def may_continue(policy: "sampling_pb2.SwapPolicy.ValueType") -> bool:
    """What a swap policy says; INVALID_FIELD for a number that is none."""
    if policy not in sampling_pb2.SwapPolicy.values():
        allowed = ", ".join(sampling_pb2.SwapPolicy.keys())
        text = f"{policy} is no swap policy; there are {allowed}"
        raise ServiceError(Reason.INVALID_FIELD, text, field="swap_policy")
    return policy == sampling_pb2.SWAP_POLICY_CONTINUE


def token_ids(data: bytes, field: str) -> list[int]:
    """Packed ids; INVALID_FIELD if the length is no multiple of 4."""
    if len(data) % 4:
        text = f"{len(data)} bytes are no multiple of 4: token ids are packed little-endian int32"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)
    return unpack_ids(data)


def sampling_params(params: sampling_pb2.SamplingParams) -> SamplingParams:
    """Sampling parameters with defaults for what was not set."""
    given = {
        name: getattr(params, name) for name in (*_SCALARS, "max_tokens", "seed") if _is_set(params, name)
    }
    return SamplingParams(
        **given,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_words=tuple(params.bad_words),
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )


def _is_set(params: sampling_pb2.SamplingParams, name: str) -> bool:
    field = params.DESCRIPTOR.fields_by_name[name]
    return params.HasField(name) if field.has_presence else True  # type: ignore[arg-type]


def sampling_params_pb(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """The same, every field set."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SCALARS},
        max_tokens=params.max_tokens,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        bad_words=params.bad_words,
        logit_bias=dict(params.logit_bias),
    )


def model_ref_pb(ref: ModelRef, base_model: str) -> sampling_pb2.ModelRef:
    """Which weights, for an answer."""
    if ref.is_base:
        return sampling_pb2.ModelRef(base_model=base_model)
    if ref.checkpoint:
        return sampling_pb2.ModelRef(checkpoint=ref.key)
    version = sampling_pb2.PolicyVersionRef(policy=ref.policy, version=ref.version)
    return sampling_pb2.ModelRef(policy_version=version)


def chat_message(message: content_pb2.ChatMessage, field: str) -> dict[str, Any]:
    """A message in the shape chat templates take; UNSUPPORTED_OPTION unless its content is text."""
    texts = []
    for index, part in enumerate(message.content.parts):
        kind = part.WhichOneof("part")
        if kind not in ("text", "json"):
            where = f"{field}.content.parts[{index}]"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, f"content of kind {kind} is not text", field=where)
        texts.append(part.text if kind == "text" else part.json)
    rendered: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if message.tool_calls:
        rendered["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name:
        rendered["name"] = message.name
    return rendered


def _tool_call(call: content_pb2.ToolCall) -> dict[str, Any]:
    text = call.arguments_json or "{}"
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = text
    rendered = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return {"id": call.id, **rendered} if call.id else rendered


def tool_spec(tool: content_pb2.ToolSpec, field: str) -> dict[str, Any]:
    """A tool in the shape chat templates take; INVALID_FIELD if its schema is no JSON."""
    try:
        parameters = json.loads(tool.parameters_json or "{}")
    except ValueError:
        where = f"{field}.parameters_json"
        raise ServiceError(Reason.INVALID_FIELD, "parameters_json is no JSON", field=where) from None
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


# Completions


def completion_pb(completion: Completion) -> sampling_pb2.Completion:
    """A completion as it leaves an engine: without text, seed and version."""
    message = sampling_pb2.Completion(
        index=completion.index,
        token_ids=pack_ids(completion.token_ids),
        logprobs=pack_floats(completion.logprobs),
        stop_reason=_STOP_REASONS[completion.stop_reason],
        matched_stop=completion.matched_stop,
    )
    if completion.top_ids:
        message.top_token_ids.CopyFrom(pack(np.asarray(completion.top_ids, dtype=np.int32)))
        message.top_logprobs.CopyFrom(pack(np.asarray(completion.top_logprobs, dtype=np.float32)))
    for span in completion.spans:
        message.version_spans.add(start=span.start, end=span.end, version=span.version)
    return message


def finished_pb(completion: Completion, text: str, seed: int, ref: ModelRef) -> sampling_pb2.Completion:
    """A completion as a caller gets it. Without spans of its own the version asked for sampled all of it."""
    message = completion_pb(completion)
    message.text = text
    message.seed = seed
    if not ref.is_base and not completion.spans:
        message.version_spans.add(start=0, end=len(completion.token_ids), version=ref.version)
    return message


# The engine's messages


def start_pb(config: EngineConfig) -> engine_pb2.StartEngineRequest:
    return engine_pb2.StartEngineRequest(
        engine=config.engine,
        model_dir=str(config.model_dir),
        context_tokens=config.context_tokens,
        dtype=config.dtype,
        serving_mode=config.serving_mode,
        max_resident_versions=config.max_resident_versions,
        max_lora_rank=config.max_lora_rank,
        threads=config.threads,
        kv_cache_bytes=config.kv_cache_bytes,
        max_rows=config.max_rows,
    )


def engine_config(request: engine_pb2.StartEngineRequest) -> EngineConfig:
    return EngineConfig(
        engine=request.engine,
        model_dir=Path(request.model_dir),
        context_tokens=request.context_tokens,
        dtype=request.dtype,
        serving_mode=request.serving_mode,
        max_resident_versions=request.max_resident_versions,
        max_lora_rank=request.max_lora_rank,
        threads=request.threads,
        kv_cache_bytes=request.kv_cache_bytes,
        max_rows=request.max_rows,
    )


def engine_info_pb(info: EngineInfo) -> engine_pb2.StartEngineResponse:
    return engine_pb2.StartEngineResponse(
        engine=info.engine,
        dtype=info.dtype,
        serving_mode=info.serving_mode,
        max_resident_versions=info.max_resident_versions,
        context_tokens=info.context_tokens,
        vocab_size=info.vocab_size,
        deterministic=info.deterministic,
        sampling_fields=info.sampling_fields,
        score_temperature=info.score_temperature,
        pid=info.pid,
        images=info.images,
        continues=info.continues,
    )


def engine_info(response: engine_pb2.StartEngineResponse) -> EngineInfo:
    return EngineInfo(
        engine=response.engine,
        dtype=response.dtype,
        serving_mode=response.serving_mode,
        max_resident_versions=response.max_resident_versions,
        context_tokens=response.context_tokens,
        vocab_size=response.vocab_size,
        deterministic=response.deterministic,
        sampling_fields=tuple(response.sampling_fields),
        score_temperature=response.score_temperature,
        pid=response.pid,
        images=response.images,
        continues=response.continues,
    )


def job_pb(job: SampleJob) -> engine_pb2.EngineSampleRequest:
    return engine_pb2.EngineSampleRequest(
        request_id=job.request_id,
        weights=job.weights,
        prompt_token_ids=pack_ids(job.prompt),
        indices=job.indices,
        params=sampling_params_pb(job.params),
        end_token_ids=job.end_token_ids,
        images=_images_pb(job.images),
        may_continue=job.may_continue,
    )


def sample_job(request: engine_pb2.EngineSampleRequest) -> SampleJob:
    return SampleJob(
        request_id=request.request_id,
        weights=request.weights,
        prompt=tuple(unpack_ids(request.prompt_token_ids)),
        indices=tuple(request.indices),
        params=sampling_params(request.params),
        end_token_ids=tuple(request.end_token_ids),
        images=_images(request.images),
        may_continue=request.may_continue,
    )


def _images_pb(images: Images) -> list[engine_pb2.EngineImage]:
    return [
        engine_pb2.EngineImage(start=image.start, token_count=image.token_count, data=image.data)
        for image in images
    ]


def _images(messages: Iterable[engine_pb2.EngineImage]) -> Images:
    return tuple(PromptImage(image.start, image.token_count, image.data) for image in messages)


def event_pb(event: SampleEvent) -> engine_pb2.EngineSampleResponse:
    response = engine_pb2.EngineSampleResponse()
    if isinstance(event, Completion):
        response.completion.CopyFrom(completion_pb(event))
    elif isinstance(event, PromptScores):
        response.prompt_logprobs.logprobs = pack_floats(event.logprobs)
    else:
        response.done.engine_time.CopyFrom(duration(event.engine_s))
        response.done.cached_prompt_tokens = event.cached_prompt_tokens
    return response


def sample_event(response: engine_pb2.EngineSampleResponse) -> SampleEvent:
    kind = response.WhichOneof("event")
    if kind == "completion":
        return completion(response.completion)
    if kind == "prompt_logprobs":
        return PromptScores(tuple(unpack_floats(response.prompt_logprobs.logprobs).tolist()))
    return SampleDone(seconds(response.done.engine_time), response.done.cached_prompt_tokens)


def completion(message: sampling_pb2.Completion) -> Completion:
    ids = tuple(unpack_ids(message.token_ids))
    return Completion(
        index=message.index,
        token_ids=ids,
        logprobs=tuple(unpack_floats(message.logprobs).tolist()),
        stop_reason=_STOP_REASON_OF[message.stop_reason],
        matched_stop=message.matched_stop,
        top_ids=tuple(tuple(int(i) for i in row) for row in _rows(message, "top_token_ids")),
        top_logprobs=tuple(tuple(row) for row in _rows(message, "top_logprobs")),
        spans=tuple(VersionSpan(span.start, span.end, span.version) for span in message.version_spans),
    )


def _rows(message: sampling_pb2.Completion, name: str) -> Iterable[list[float]]:
    if not message.HasField(name):  # type: ignore[arg-type]
        return ()
    rows: list[list[float]] = unpack(getattr(message, name)).tolist()
    return rows


def score_pb(job: ScoreJob) -> engine_pb2.EngineScoreRequest:
    return engine_pb2.EngineScoreRequest(
        request_id=job.request_id,
        weights=job.weights,
        sequences=[pack_ids(sequence) for sequence in job.sequences],
        temperature=job.temperature,
        images=[engine_pb2.EngineImages(images=_images_pb(images)) for images in job.images],
    )


def score_job(request: engine_pb2.EngineScoreRequest) -> ScoreJob:
    return ScoreJob(
        request_id=request.request_id,
        weights=request.weights,
        sequences=tuple(tuple(unpack_ids(sequence)) for sequence in request.sequences),
        temperature=request.temperature,
        images=tuple(_images(each.images) for each in request.images),
    )


def weights_pb(weights: Weights) -> engine_pb2.LoadWeightsRequest:
    directory = str(weights.directory) if weights.directory is not None else ""
    return engine_pb2.LoadWeightsRequest(
        key=weights.key, directory=directory, rank=weights.rank, full=weights.full
    )


def weights(request: engine_pb2.LoadWeightsRequest) -> Weights:
    directory = Path(request.directory) if request.directory else None
    return Weights(request.key, directory, request.rank, request.full)


def duration(value_s: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(value_s * 1e9))
    return message


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9
