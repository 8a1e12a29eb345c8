"""Tool calls in what a model wrote: found, repaired where it is clear what was meant, refused in words
otherwise.

    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      Qwen, Hermes, ChatML
    {"name": "add", "parameters": {"a": 1}}                            Llama 3

The text is hostile: it is never evaluated, and its size, number and depth are bounded.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.environments.content import ToolCall, dump_json
from opentinker.environments.errors import InvalidEpisodeData

MAX_CALL_CHARACTERS = 65_536
MAX_CALLS = 32

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_FENCE = re.compile(r"^```[a-z]*\n?|\n?```$")
_WORD = re.compile(r"\w+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"{": "}", "[": "]"}


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a model said: its text without the calls, the calls, and what to tell it about those that
    cannot be read.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def parse(text: str, tools: Sequence[str]) -> Parsed:
    """The tool calls in a reply, of tools with these names."""
    rest, bodies = _tagged(text)
    if not bodies:
        rest, bodies = _bare(text)
    calls: list[ToolCall] = []
    problems: list[str] = []
    for number, body in enumerate(bodies[:MAX_CALLS], start=1):
        try:
            calls.append(_call(body, tools, f"call-{number}"))
        except InvalidEpisodeData as error:
            problems.append(f"malformed tool call: {error}")
    if len(bodies) > MAX_CALLS:
        problems.append(f"{len(bodies)} tool calls at once; at most {MAX_CALLS} are made")
    # All or nothing: half of what was asked for would be something else.
    return Parsed(rest.strip(), () if problems else tuple(calls), tuple(problems))


def repaired(text: str) -> Any:
    """The JSON value that a text is meant to be: fences taken off, quotes and words of Python made JSON's,
    trailing commas dropped, what is open closed. InvalidEpisodeData if it is none.
    """
    if len(text) > MAX_CALL_CHARACTERS:
        raise InvalidEpisodeData(f"{len(text)} characters are over the {MAX_CALL_CHARACTERS} of a call")
    stripped = _FENCE.sub("", text.strip()).strip()
    problem = ""
    menders: tuple[Callable[[str], str], ...] = (str, _mended)
    for mend in menders:
        try:
            return json.loads(mend(stripped), strict=False, parse_constant=_no_constant)
        except RecursionError:
            raise InvalidEpisodeData("it is nested too deeply") from None
        except ValueError as error:
            problem = str(error)
    raise InvalidEpisodeData(f"it is no JSON ({problem})")


def _tagged(text: str) -> tuple[str, list[str]]:
    """The text around the tags, and what stands in them; the last one may be open."""
    before, *parts = text.split(_BEGIN)
    rest, bodies = [before], []
    for part in parts:
        body, _, after = part.partition(_END)
        bodies.append(body)
        rest.append(after)
    return "".join(rest), bodies


def _bare(text: str) -> tuple[str, list[str]]:
    """Calls that are the whole text, or all after a tag; several are divided by semicolons."""
    before, tag, after = text.partition(_PYTHON_TAG)
    body = after if tag else before
    stripped = _FENCE.sub("", body.strip()).strip()
    if not tag and not (stripped.startswith("{") and re.match(r"\{\s*[\"']name[\"']\s*:", stripped)):
        return text, []
    return before if tag else "", _objects(stripped)


def _objects(text: str) -> list[str]:
    """The text divided at semicolons outside objects and strings."""
    parts, depth, quote, start, escaped = [], 0, "", 0, False
    for place, character in enumerate(text):
        if quote:
            if escaped or character == "\\":
                escaped = not escaped
            elif character == quote:
                quote = ""
        elif character == '"':
            quote = character
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == ";" and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _call(body: str, tools: Sequence[str], name: str) -> ToolCall:
    value = repaired(body)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise InvalidEpisodeData('a call is {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = repaired(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise InvalidEpisodeData(f"the arguments of {value['name']} must be an object")
    if value["name"] not in tools:
        raise InvalidEpisodeData(f"there is no tool {value['name'][:60]!r}; tools: {', '.join(tools)}")
    return ToolCall(value["name"], dump_json(arguments), name)


def _mended(text: str) -> str:
    """One pass over the text; see `repaired`."""
    written: list[str] = []
    closing: list[str] = []
    place = 0
    while place < len(text):
        character = text[place]
        if character in "\"'":
            string, place = _string(text, place)
            written.append(string)
            continue
        if character.isalpha():
            word = _WORD.match(text, place)
            assert word is not None, "it begins with a letter"
            written.append(_WORDS.get(word.group(), word.group()))
            place = word.end()
            continue
        if character in "}]":
            _drop_comma(written)
            if not closing:
                break  # more is closed than was opened: the value is complete
            written.append(closing.pop())
            place += 1
            if not closing:
                break
            continue
        if character in _CLOSES:
            closing.append(_CLOSES[character])
        written.append(character)
        place += 1
    _drop_comma(written)
    return "".join(written) + "".join(reversed(closing))


def _string(text: str, start: int) -> tuple[str, int]:
    """The string that begins at a place as JSON, and the place after it. One that is open ends with the
    text.
    """
    quote, place = text[start], start + 1
    characters: list[str] = []
    while place < len(text) and text[place] != quote:
        if text[place] == "\\" and place + 1 < len(text):
            pair = text[place : place + 2]
            characters.append("'" if pair == "\\'" else pair)
            place += 2
            continue
        characters.append('\\"' if text[place] == '"' else text[place])
        place += 1
    return f'"{"".join(characters)}"', place + 1


def _drop_comma(written: list[str]) -> None:
    while written and (written[-1].isspace() or written[-1] == ","):
        written.pop()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
