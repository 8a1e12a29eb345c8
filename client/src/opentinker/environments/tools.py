"""Tools: typed Python functions that a model may call, and environments made of them.

    class Shop(ToolEnvironment):
        @tool
        def price(self, item: str, count: int = 1) -> float:
            "The price of some items."

A call that makes no sense (no such tool, arguments that are missing, unknown or of another type) is an
observation for the model, and so is a `ToolError` of the function. Anything else that it raises is a fault
of the environment.
"""

import inspect
import json
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, overload

from opentinker.environments.base import Environment
from opentinker.environments.content import Content, Message, ToolCall, dump_json
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.types import Action, Observation, StepResult

_SIMPLE: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """What a tool says to the model instead of a result."""


class Tool:
    """A function that a model may call. Made by `tool`; calling it calls the function."""

    def __init__(self, function: Callable[..., Any], name: str = "", instance: Any = None) -> None:
        self.name = name or function.__name__
        self._function = function
        self._instance = instance
        described = inspect.cleandoc(function.__doc__ or "")
        self.description, self._arguments = _read_docstring(described)
        self.parameters = self._schema()

    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI's shape, as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def is_async(self) -> bool:
        """Whether its results are awaited."""
        return inspect.iscoroutinefunction(self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = (self._instance, *args) if self._instance is not None else args
        return self._function(*bound, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> "Tool":
        return self if instance is None else Tool(self._function, self.name, instance)

    def read(self, arguments: str) -> dict[str, Any]:
        """Arguments from their JSON text. ToolError says what is wrong with them."""
        given = self._object(arguments)
        if problem := check(given, self.parameters, "arguments"):
            raise ToolError(f"{self.name}: {problem}")
        return given

    def _object(self, arguments: str) -> dict[str, Any]:
        try:
            given = json.loads(arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments of {self.name} are no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ToolError(f"{self.name}: arguments must be of type object, not {json.dumps(given)[:60]}")
        return given

    def _schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {}
        required = []
        hints = typing.get_type_hints(self._function, include_extras=True)
        parameters = list(inspect.signature(self._function).parameters.values())
        if parameters and parameters[0].name == "self":
            parameters = parameters[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise EnvironmentDefinitionError(
                    f"the tool {self.name} takes {parameter}: name its arguments"
                )
            if parameter.name not in hints:
                raise EnvironmentDefinitionError(
                    f"the argument {parameter.name!r} of the tool {self.name} has no type"
                )
            schema = _schema_of(hints[parameter.name], f"{self.name}({parameter.name})")
            if parameter.name in self._arguments:
                schema.setdefault("description", self._arguments[parameter.name])
            if parameter.default is parameter.empty:
                required.append(parameter.name)
            elif parameter.default is not None:
                schema["default"] = json.loads(dump_json(parameter.default))
            properties[parameter.name] = schema
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, /, *, name: str = "") -> Any:
    """Make a tool of a function or method: its types give the JSON schema, its docstring the description (and
    lines `argument: what it is` under "Args:" those of the arguments).
    """
    if function is None:
        return lambda given: Tool(given, name)
    return Tool(function, name)


class ToolEnvironment(Environment):
    """A tool belt: the model calls tools as often as it likes, then says something without a call, which is
    what is graded.

    Write `reset`, tools as methods under `@tool` (or functions in `tools`), and `answered`.
    """

    tools: ClassVar[tuple[Tool, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = {name: each for name, each in vars(cls).items() if isinstance(each, Tool)}
        known = {each.name: each for each in (*cls.tools, *methods.values())}
        cls.tools = tuple(known.values())
        cls.awaits = cls.awaits or any(each.is_async for each in cls.tools)

    def answered(self, text: str) -> StepResult | Awaitable[StepResult]:
        """What the model said without calling a tool. By default the end, without a reward."""
        return StepResult(terminated=True)

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Run the calls in order, or end with the answer."""
        if not action.tool_calls:
            return self.answered(action.text)
        belt = self._belt()
        if not any(each.is_async for each in belt.values()):
            told = [_message(call, _run(belt, call)) for call in action.tool_calls]
            return StepResult(Observation(messages=told))
        return self._run_all(belt, action.tool_calls)

    async def _run_all(self, belt: Mapping[str, Tool], calls: Sequence[ToolCall]) -> StepResult:
        told = []
        for call in calls:
            value = _run(belt, call)
            if isinstance(value, Awaitable):
                try:
                    value = await value
                except ToolError as error:
                    value = _error(error)
            told.append(_message(call, value))
        return StepResult(Observation(messages=told))

    def _belt(self) -> dict[str, Tool]:
        """The tools by name, methods bound to this instance."""
        names = {
            name for cls in type(self).__mro__ for name, each in vars(cls).items() if isinstance(each, Tool)
        }
        methods = [getattr(self, name) for name in names]
        bound = {each.name: each for each in methods if isinstance(each, Tool)}
        return {each.name: bound.get(each.name, each) for each in self.tools}


def _run(belt: Mapping[str, Tool], call: ToolCall) -> Any:
    called = belt.get(call.name)
    if called is None:
        return f"error: there is no tool {call.name!r}; tools: {', '.join(belt)}"
    try:
        return called(**called.read(call.arguments))
    except ToolError as error:
        return _error(error)


def _error(error: ToolError) -> str:
    return f"error: {error}"


def _message(call: ToolCall, value: Any) -> Message:
    content = value if isinstance(value, str | Content) else dump_json(value)
    return Message("tool", content, tool_call_id=call.id, name=call.name)


def check(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """What is wrong with a JSON value by a schema that `Tool` made, or nothing."""
    if "anyOf" in schema:
        problems = [check(value, each, where) for each in schema["anyOf"]]
        return "" if "" in problems else problems[0]
    if "enum" in schema:
        return "" if value in schema["enum"] else f"{where} must be one of {schema['enum']}, not {value!r}"
    kind = schema.get("type")
    if kind is None:
        return ""
    wrong = not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")
    if wrong:
        return f"{where} must be of type {kind}, not {json.dumps(value)[:60]}"
    if kind == "array":
        problems = [check(each, schema["items"], f"{where}[{index}]") for index, each in enumerate(value)]
        return next(filter(None, problems), "")
    if kind == "object":
        return _check_object(value, schema, where)
    return ""


def _check_object(value: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> str:
    properties = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{where}: {', '.join(missing)} missing"
    others = schema.get("additionalProperties", True)
    for name, each in value.items():
        inner = properties.get(name, others)
        if inner is False:
            return f"{where} has no {name!r}; it takes {', '.join(properties) or 'nothing'}"
        if isinstance(inner, Mapping) and (problem := check(each, inner, f"{where}.{name}")):
            return problem
    return ""


def _schema_of(hint: Any, where: str) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        schema = _schema_of(arguments[0], where)
        words = [each for each in arguments[1:] if isinstance(each, str)]
        return schema | ({"description": words[0]} if words else {})
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(each, where) for each in arguments]}
    if hint is list or origin in (list, Sequence):
        return {"type": "array", "items": _schema_of(arguments[0], where) if arguments else {}}
    if hint is dict or origin in (dict, Mapping):
        if arguments and arguments[0] is not str:
            raise EnvironmentDefinitionError(
                f"{where}: the keys of a JSON object are text, not {arguments[0]}"
            )
        return {
            "type": "object",
            "additionalProperties": _schema_of(arguments[1], where) if arguments else True,
        }
    raise EnvironmentDefinitionError(
        f"{where}: {hint} has no JSON schema; use str, int, float, bool, list, dict, Literal, unions of "
        "them, or Any"
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what it says of arguments: lines `name: text` below "Args:"."""
    before, found, after = text.partition("\nArgs:\n")
    arguments = {}
    for line in after.splitlines() if found else ():
        if not line.strip():
            break
        name, colon, words = line.strip().partition(":")
        if colon:
            arguments[name.split(" ")[0]] = words.strip()
    return before.strip(), arguments


def _no_number(text: str) -> None:
    # Python reads NaN and Infinity; JSON has no such numbers, and a tool would compute with them.
    raise ValueError(f"{text} is no number")


def in_words(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The tools as a text, for models whose chat template does not show them."""
    if not schemas:
        raise InvalidEpisodeData("there are no tools to describe")
    lines = "\n".join(dump_json(dict(schema)) for schema in schemas)
    return (
        "You may call these tools, each given by a JSON schema:\n"
        f"<tools>\n{lines}\n</tools>\n\n"
        "To call one, write its name and arguments as JSON within tool_call tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
