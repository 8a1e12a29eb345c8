"""Messages of a conversation as the gateway keeps them: comparable, and in the shape of chat templates."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. `arguments` is the model's text of a JSON value."""

    name: str
    arguments: str
    id: str = ""

    def for_template(self) -> dict[str, Any]:
        """Templates expect the arguments as an object where they are one."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        call = {"type": "function", "function": {"name": self.name, "arguments": arguments}}
        return {"id": self.id, **call} if self.id else call


@dataclass(frozen=True, slots=True)
class Message:
    """One message: role `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""

    def for_template(self) -> dict[str, Any]:
        """In the shape that chat templates take."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        if self.name:
            message["name"] = self.name
        return message

    def facts(self) -> list[object]:
        """What two messages must have in common to be the same."""
        calls = [[call.id, call.name, call.arguments] for call in self.calls]
        return [self.role, self.content, calls, self.call_id, self.name]


def rolling_digests(messages: Sequence[Message], setting: object) -> list[bytes]:
    """For each message a digest of all up to it and of `setting` (the tools, the template's options): equal
    exactly where the conversations are.
    """
    digest = hashlib.sha256(_text(setting)).digest()
    found = []
    for message in messages:
        digest = hashlib.sha256(digest + _text(message.facts())).digest()
        found.append(digest)
    return found


def _text(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=_plain).encode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
