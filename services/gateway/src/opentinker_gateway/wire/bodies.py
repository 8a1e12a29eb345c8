"""Bodies of requests: JSON that is what it should be, with every option honoured or refused by name."""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 128

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "function_call": ("none",),
    "functions": ([],),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Options of OpenAI's that have no counterpart here, and the values that ask for nothing."""


class Body(BaseModel):
    """A part of a request: nothing unknown, nothing of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(Body):
    """What chat and plain completions have in common."""

    model: str = Field(min_length=1, max_length=512)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] = []
    seed: int | None = Field(default=None, ge=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    user: str = ""
    metadata: dict[str, str] = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    # Beyond OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    bad_words: list[str] = []


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] = ""
    name: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    refusal: str = ""
    annotations: list[Any] = Field(default=[], max_length=0)


class Function(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(Sampling):
    """Of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] = Field(default=[], max_length=512)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] = {}


class TextBody(Sampling):
    """Of POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False


class EpisodeBody(Body):
    """Of POST /episodes."""

    request_id: str = Field(min_length=1, max_length=256)
    model: str = Field(min_length=1, max_length=512)
    group: str = Field(default="", max_length=512)
    seed: int = Field(default=0, ge=0)
    sampling: dict[str, Any] = {}
    max_calls: int | None = Field(default=None, ge=1)
    """Replies; the call after the last of them is refused."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Prompts and replies of a branch together, as of a context of that size."""


B = TypeVar("B", bound=Body)


def read_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. INVALID_FIELD for anything else."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
        # A lone surrogate is JSON and no text.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        problem = str(error) if not isinstance(error, RecursionError) else "it is nested too deeply"
        raise ServiceError(Reason.INVALID_FIELD, f"the body is no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ServiceError(Reason.INVALID_FIELD, "the body must be one JSON object")
    return value


def parse(kind: type[B], value: Mapping[str, Any]) -> B:
    """A body. What is null is taken for absent. INVALID_FIELD and UNSUPPORTED_OPTION name the field."""
    given = {name: each for name, each in value.items() if each is not None}
    known = kind.model_fields
    for name, each in list(given.items()):
        if name in known:
            continue
        if name not in NEUTRAL:
            raise ServiceError(
                Reason.UNSUPPORTED_OPTION, f"unrecognized request argument supplied: {name}", field=name
            )
        if each not in NEUTRAL[name]:
            raise ServiceError(Reason.UNSUPPORTED_OPTION, f"{name} is not supported here", field=name)
        del given[name]
    try:
        return kind.model_validate(_without_nulls(given))
    except ValidationError as error:
        raise _invalid(error) from None


def _without_nulls(value: Any) -> Any:
    """Clients send what they were given back with their nulls; schemas and arguments keep theirs, since they
    are opaque here.
    """
    if isinstance(value, dict):
        return {
            key: each if key in ("parameters", "schema") else _without_nulls(each)
            for key, each in value.items()
            if each is not None
        }
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _invalid(error: ValidationError) -> ServiceError:
    """Each thing that is wrong once: of the kinds that a field may have, only the nearest is spoken of."""
    found: dict[str, str] = {}
    for each in sorted(
        error.errors(include_url=False, include_input=False), key=lambda each: -len(each["loc"])
    ):
        path = _path(each["loc"])
        found.setdefault(path, str(each["msg"]))
    violations = list(found.items())[:8]
    text = "; ".join(f"{path}: {problem}" for path, problem in violations)
    return ServiceError(Reason.INVALID_FIELD, text, violations=violations)


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without the names of the alternatives that were tried."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step[0].islower() and step not in ("str", "list", "int", "float"):
            path += f".{step}" if path else step
    return path


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
