"""From bodies to what the domain knows: messages, tools, sampling options."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from opentinker_gateway.domain.messages import Call, Message
from opentinker_gateway.domain.prompts import RESERVED, Setting
from opentinker_gateway.domain.sampling import MAX_SEED, SamplingOptions
from opentinker_gateway.wire.bodies import ChatBody, ChatMessage, Sampling, TextBody, TextPart
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

OVERRIDES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop")
"""What the creator of an episode may decide over its agent's head."""


def messages(body: ChatBody) -> list[Message]:
    """The conversation. INVALID_FIELD for tool results and calls where they do not belong."""
    return [_message(each, f"messages[{index}]") for index, each in enumerate(body.messages)]


def setting(body: ChatBody) -> Setting:
    """The tools on offer, and further variables of the template."""
    reserved = sorted(set(body.chat_template_kwargs) & set(RESERVED))
    if reserved:
        raise ServiceError(
            Reason.INVALID_FIELD,
            f"chat_template_kwargs may not set {', '.join(reserved)}",
            field="chat_template_kwargs",
        )
    for index, each in enumerate(body.tools):
        if each.function.strict:
            where = f"tools[{index}].function.strict"
            text = f"{where}: nothing holds a call to its schema here"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field=where)
    offered = body.tools if body.tool_choice != "none" else []
    tools = [{"type": "function", "function": _function(each.function.model_dump())} for each in offered]
    return Setting(tuple(tools), body.chat_template_kwargs or None)


def chat_options(body: ChatBody, fields: Collection[str]) -> SamplingOptions:
    """How to sample a reply. `fields` are the options that the model's engine honours."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        text = "max_tokens is the old name of max_completion_tokens; give one of them"
        raise ServiceError(Reason.INVALID_FIELD, text, field="max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ServiceError(Reason.INVALID_FIELD, "top_logprobs needs logprobs", field="top_logprobs")
    return dataclasses.replace(
        _common(body),
        max_tokens=body.max_completion_tokens or body.max_tokens,
        top_logprobs=body.top_logprobs,
        json_schema=_schema(body, fields),
    )


def text_options(body: TextBody) -> SamplingOptions:
    """How to sample plain completions."""
    return dataclasses.replace(
        _common(body),
        max_tokens=body.max_tokens,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=body.echo and body.logprobs is not None,
    )


def overrides(given: Mapping[str, Any]) -> dict[str, object]:
    """What an episode's creator decides. INVALID_FIELD for what is no sampling option of the right type."""
    unknown = sorted(set(given) - set(OVERRIDES))
    if unknown:
        text = f"sampling may hold {', '.join(OVERRIDES)}; not {', '.join(unknown)}"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"sampling.{unknown[0]}")
    decided: dict[str, object] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "stop":
            good = isinstance(value, list) and all(isinstance(each, str) for each in value)
        elif name in ("max_tokens", "top_k"):
            good = isinstance(value, int) and not isinstance(value, bool)
        else:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good:
            raise ServiceError(Reason.INVALID_FIELD, f"{name} has the wrong type", field=f"sampling.{name}")
        decided[name] = tuple(value) if name == "stop" else value
    return decided


def forced_tool(body: ChatBody) -> str | None:
    """The tool that must be called: its name, "" for any; None where the model may choose."""
    choice = body.tool_choice
    if choice in ("none", "auto"):
        return None
    if not body.tools:
        raise ServiceError(Reason.INVALID_FIELD, "tool_choice needs tools", field="tool_choice")
    if isinstance(choice, str):
        return ""
    name = choice.function.name
    if name not in (tool.function.name for tool in body.tools):
        text = f"tool_choice names {name!r}, which is none of the tools"
        raise ServiceError(Reason.INVALID_FIELD, text, field="tool_choice")
    return name


def _common(body: Sampling) -> SamplingOptions:
    if body.seed is not None and body.seed > MAX_SEED:
        raise ServiceError(Reason.INVALID_FIELD, f"seed must be at most {MAX_SEED}", field="seed")
    return SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        seed=body.seed,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        ignore_eos=body.ignore_eos,
        bad_words=tuple(body.bad_words),
        logit_bias=_bias(body.logit_bias),
    )


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(name): value for name, value in given.items()}
    except ValueError:
        text = "logit_bias maps token ids, as strings, to numbers"
        raise ServiceError(Reason.INVALID_FIELD, text, field="logit_bias") from None


def _schema(body: ChatBody, fields: Collection[str]) -> str:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return ""
    if "json_schema" not in fields:
        text = f"response_format {wanted.type}: the engine that serves this model cannot be held to a schema"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="response_format")
    if body.tools:
        text = "response_format and tools cannot be combined: a call is no value of the schema"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="response_format")
    if wanted.type == "json_object":
        return json.dumps({"type": "object"})
    if wanted.json_schema is None or not wanted.json_schema.schema_:
        text = "response_format.json_schema needs a schema"
        raise ServiceError(Reason.INVALID_FIELD, text, field="response_format.json_schema.schema")
    return json.dumps(wanted.json_schema.schema_)


def _message(message: ChatMessage, where: str) -> Message:
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        text = f"{where}.tool_calls: only an assistant calls tools"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.tool_calls")
    if bool(message.tool_call_id) != (role == "tool"):
        text = f"{where}.tool_call_id: a tool message, and no other, names the call that it answers"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"{where}.tool_call_id")
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    calls = tuple(Call(each.function.name, each.function.arguments, each.id) for each in message.tool_calls)
    return Message(role, content or message.refusal, calls, message.tool_call_id, message.name)


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    """As it was given: what was left out stays out of the prompt."""
    kept = {"name": function["name"], "description": function["description"]}
    return {**kept, "parameters": function["parameters"] or {"type": "object", "properties": {}}}
