"""Tool calls in what a model says.

Models write calls in one of two ways, which their chat template shows: between tags, `<tool_call>{...}
</tool_call>`, or as a reply that is nothing but JSON. A splitter takes a reply as it comes and gives it back
as text and calls. What looks like a call and is none (JSON that does not parse, a tool that was not offered)
is text: nothing that a model said is lost, and nothing that it says is an error.
"""

import json
from collections.abc import Collection
from enum import Enum
from typing import Any, Protocol

from opentinker_gateway.domain.messages import Call

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Piece = str | Call


class ToolFormat(Enum):
    """How a model writes calls."""

    TAGGED = "tagged"
    BARE = "bare"


class Splitter(Protocol):
    """Takes one reply."""

    def feed(self, text: str) -> list[Piece]:
        """More of the reply; what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """The reply is over; what is left."""
        ...


def splitter(form: ToolFormat, names: Collection[str]) -> Splitter:
    """A splitter of one reply; `names` are the tools that were offered."""
    if not names:
        return PlainText()
    return TaggedCalls(names) if form is ToolFormat.TAGGED else BareCalls(names)


class PlainText:
    """No tools: all of it is text."""

    def feed(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


class TaggedCalls:
    """Calls between tags. White space around calls is dropped."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        """Text that may yet be white space before a call, a tag, or the inside of a call."""
        self._inside = False
        self._gap = ""
        """White space before the tag that was opened; text again if no call follows."""
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while (at := self._held.find(CLOSE if self._inside else OPEN)) >= 0:
            before, self._held = self._held[:at], self._held[at:]
            if self._inside:
                self._held = self._held.removeprefix(CLOSE)
                pieces += self._body(before, CLOSE)
            else:
                self._held = self._held.removeprefix(OPEN)
                pieces += self._text(before.rstrip())
                self._gap = before[len(before.rstrip()) :]
            self._inside = not self._inside
        if not self._inside:
            sure = (
                self._held.rstrip()
                if not self._may_be_tag()
                else self._held[: self._held.rfind("<")].rstrip()
            )
            self._held = self._held[len(sure) :]
            pieces += self._text(sure)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._inside:
            return self._body(held, "")
        return self._text(held) if held.strip() or not self._after_call else []

    def _may_be_tag(self) -> bool:
        at = self._held.rfind("<")
        return at >= 0 and OPEN.startswith(self._held[at:])

    def _text(self, text: str) -> list[Piece]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [text]

    def _body(self, body: str, close: str) -> list[Piece]:
        calls = read_calls(body, self._names)
        if calls is None:
            return [self._gap + OPEN + body + close]
        self._after_call = True
        return [*calls]


class BareCalls:
    """A reply that is JSON from its first character on is held until its end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._text = False

    def feed(self, text: str) -> list[Piece]:
        if self._text:
            return _some(text)
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] in "{[":
            return []
        self._text = True
        return [self._held]

    def finish(self) -> list[Piece]:
        if self._text:
            return []
        calls = read_calls(self._held, self._names)
        return [*calls] if calls is not None else _some(self._held)


def read_calls(body: str, names: Collection[str]) -> list[Call] | None:
    """The calls that a JSON text makes: an object or a list of objects with a name and arguments. None if it
    is anything else, or calls what was not offered.
    """
    try:
        value = json.loads(body.strip())
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    calls = [_call(item, names) for item in items]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _call(item: Any, names: Collection[str]) -> Call | None:
    if not isinstance(item, dict):
        return None
    if isinstance(item.get("function"), dict):
        item = item["function"]
    name = item.get("name")
    arguments = item.get("arguments", item.get("parameters", {}))
    if not isinstance(name, str) or name not in names:
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(name, text)


def call_text(call: Call) -> str:
    """A call between tags, for templates that know no tools."""
    item = {"name": call.name, "arguments": call.for_template()["function"]["arguments"]}
    return f"{OPEN}\n{json.dumps(item, ensure_ascii=False)}\n{CLOSE}"


def _some(text: str) -> list[Piece]:
    return [text] if text else []
