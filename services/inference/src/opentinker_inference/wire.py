"""Requests, between protos and domain. Beside it only `wire_completions` and `wire_engine` know both."""

import hashlib
import json
from typing import Any

from google.protobuf.duration_pb2 import Duration

from opentinker_inference.domain.images import PromptTokens
from opentinker_inference.domain.requests import SampleSpec
from opentinker_inference.domain.sampling import (
    SamplingParams,
)
from opentinker_inference.domain.versions import ModelRef, check_policy_name, checkpoint_ref
from opentinker_kit.errors import ServiceError
from opentinkerapi.data.v1 import content_pb2
from opentinkerapi.inference.v1 import inference_service_pb2, sampling_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack_ids

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
    "json_schema",
    "raw_logprobs",
)


# Public requests


def sample_spec(
    request: inference_service_pb2.SampleRequest,
    prompt: PromptTokens,
    request_id: str,
    *,
    stream: bool = False,
) -> SampleSpec:
    """A Sample request, its prompt as it was read, known as `request_id`; INVALID_FIELD if it is malformed.
    Values are checked later, against the engine.
    """
    return SampleSpec(
        request_id=request_id,
        digest=request_digest(request),
        model=model_ref(request.model),
        prompt=prompt.ids,
        images=prompt.images,
        params=sampling_params(request.params),
        seed_given=request.params.HasField("seed"),
        max_tokens_given=request.params.HasField("max_tokens"),
        n=request.n if request.HasField("n") else 1,
        may_continue=may_continue(request.swap_policy),
        stream=stream,
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


def duration(value_s: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(value_s * 1e9))
    return message


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9
