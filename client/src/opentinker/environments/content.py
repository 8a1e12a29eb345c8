"""What agents and environments say to each other: content parts, chat messages, tool calls.

Everything is frozen and compares by value, so that a hosted episode can be compared with one played
in-process.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from opentinker.environments.errors import InvalidEpisodeData

if TYPE_CHECKING:
    import numpy

ROLES = ("system", "user", "assistant", "tool")
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")
DTYPES = ("float32", "float64", "int32", "int64", "bool", "uint8")
INLINE_MAX_BYTES = 2 * 1024 * 1024
IMAGE_MAX_BYTES = 16 * 1024 * 1024
JSON_MAX_CHARACTERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value, kept as its text; `Json.of(value)` makes one."""

    text: str

    @classmethod
    def of(cls, value: Any) -> "Json":
        return cls(dump_json(value))

    @property
    def value(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image, at most 16 MiB (2 MiB from a hosted environment)."""

    data: bytes
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        if self.media_type not in IMAGE_TYPES:
            raise InvalidEpisodeData(f"media_type {self.media_type!r} is none of {', '.join(IMAGE_TYPES)}")
        _check_size("an image", self.data, IMAGE_MAX_BYTES)


@dataclass(frozen=True, slots=True)
class Array:
    """A numeric array, at most 2 MiB: dtype name, shape and its bytes, little-endian in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidEpisodeData(
                f"an array of {self.dtype} cannot travel; use one of {', '.join(DTYPES)}"
            )
        _check_size("an array", self.data)

    @classmethod
    def of(cls, array: "numpy.ndarray[Any, Any]") -> "Array":
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(array.dtype.name, tuple(array.shape), little.tobytes(order="C"))

    def numpy(self) -> "numpy.ndarray[Any, Any]":
        """The array, read-only."""
        import numpy

        return numpy.frombuffer(self.data, dtype=numpy.dtype(self.dtype).newbyteorder("<")).reshape(
            self.shape
        )


Part = Text | Json | Image | Array


@dataclass(frozen=True, slots=True)
class Content:
    """A sequence of parts. `Content.of("text")` and `Content.of([part, "text", …])` make one."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, value: "Content | str | Part | Iterable[str | Part]") -> "Content":
        if isinstance(value, Content):
            return value
        if isinstance(value, str):
            return cls((Text(value),))
        if isinstance(value, Part):
            return cls((value,))
        if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes):
            parts = tuple(Text(part) if isinstance(part, str) else part for part in value)
            if all(isinstance(part, Part) for part in parts):
                return cls(parts)
        raise InvalidEpisodeData(
            f"content must be text or parts (Text, Json, Image, Array), not {type(value).__name__}"
        )

    @property
    def text(self) -> str:
        """The text and JSON parts, joined. InvalidEpisodeData if there are images or arrays."""
        texts = []
        for part in self.parts:
            if not isinstance(part, Text | Json):
                raise InvalidEpisodeData(f"a part of kind {type(part).__name__} has no text form")
            texts.append(part.text)
        return "".join(texts)

    @property
    def is_text(self) -> bool:
        """Whether `text` gives all of it."""
        return all(isinstance(part, Text | Json) for part in self.parts)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images, in order."""
        return tuple(part for part in self.parts if isinstance(part, Image))

    def for_template(self) -> str | list[dict[str, str]]:
        """As chat templates take it: a text, or where there are images a list of parts.

        An image is said to be there and no more. InvalidEpisodeData if there are arrays.
        """
        if not self.images:
            return self.text
        return [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": Content((part,)).text}
            for part in self.parts
        ]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A request to run a tool. `arguments` is the model's text, which need not be valid JSON."""

    name: str
    arguments: str = "{}"
    id: str = ""

    def to_dict(self) -> dict[str, Any]:
        """In the shape that chat templates expect: arguments as an object where they are one."""
        try:
            arguments = json.loads(self.arguments)
        except ValueError:
            arguments = self.arguments
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation: role `system`, `user`, `assistant` or `tool`."""

    role: str
    content: Content
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __init__(
        self,
        role: str,
        content: Content | str | Iterable[str | Part] = "",
        tool_calls: Iterable[ToolCall] = (),
        tool_call_id: str = "",
        name: str = "",
    ) -> None:
        if role not in ROLES:
            raise InvalidEpisodeData(f"role {role!r} is none of {', '.join(ROLES)}")
        set_field = object.__setattr__
        set_field(self, "role", role)
        set_field(self, "content", Content.of(content))
        set_field(self, "tool_calls", tuple(tool_calls))
        set_field(self, "tool_call_id", tool_call_id)
        set_field(self, "name", name)

    @classmethod
    def of(cls, value: "Message | Mapping[str, Any]") -> "Message":
        """A message, from one or from a dictionary in OpenAI's shape with text content."""
        if isinstance(value, Message):
            return value
        if not isinstance(value, Mapping):
            raise InvalidEpisodeData(f"a message must be a Message or a dict, not {type(value).__name__}")
        unknown = set(value) - {"role", "content", "tool_calls", "tool_call_id", "name"}
        if unknown or "role" not in value:
            raise InvalidEpisodeData(
                f"a message has role, content, tool_calls, tool_call_id and name, not {sorted(value)}"
            )
        calls = [_tool_call(call) for call in value.get("tool_calls") or ()]
        return cls(
            value["role"],
            value.get("content") or "",
            calls,
            value.get("tool_call_id") or "",
            value.get("name") or "",
        )

    def to_dict(self) -> dict[str, Any]:
        """In OpenAI's shape, as chat templates take it. InvalidEpisodeData if the content holds arrays."""
        message: dict[str, Any] = {"role": self.role, "content": self.content.for_template()}
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message


def _check_size(what: str, data: bytes, most: int = INLINE_MAX_BYTES) -> None:
    if len(data) > most:
        raise InvalidEpisodeData(f"{what} of {len(data)} bytes is over the {most} that travel")


def _tool_call(value: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(value, ToolCall):
        return value
    function = value.get("function", value)
    arguments = function.get("arguments", "{}")
    return ToolCall(
        function["name"],
        arguments if isinstance(arguments, str) else dump_json(arguments),
        value.get("id") or "",
    )


def dump_json(value: Any) -> str:
    """JSON text of a value. InvalidEpisodeData if it has none (NaN and inf have none)."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEpisodeData(f"not representable as JSON: {error}") from None


def plain_json(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The object as it looks after a trip over the wire: tuples are lists, keys are strings.

    So an environment played in-process is seen exactly as a hosted one.
    """
    if not isinstance(value, Mapping):
        raise InvalidEpisodeData(f"{what} must be a dict, not {type(value).__name__}")
    if not value:
        return {}
    try:
        text = dump_json(dict(value))
        if len(text) > JSON_MAX_CHARACTERS:
            raise InvalidEpisodeData(f"{len(text)} characters are over the {JSON_MAX_CHARACTERS}")
        plain: dict[str, Any] = json.loads(text)
    except InvalidEpisodeData as error:
        raise InvalidEpisodeData(f"{what}: {error}") from None
    return plain
