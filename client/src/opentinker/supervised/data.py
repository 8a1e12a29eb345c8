"""Data sets for supervised tuning: where rows come from, and what a row may say.

A row is a conversation, {"messages": [...], "tools": [...]?}, or a {"prompt": ..., "completion": ...} of two
texts or of two lists of messages. What is malformed is refused by row and field; nothing is skipped.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

A content is a text or a list of parts; see `supervised.parts`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.environments.content import ROLES, Image, Message
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.rows import Source, raw_rows
from opentinker.errors import invalid
from opentinker.supervised.parts import read_content

ROW_KEYS = ("messages", "tools", "prompt", "completion", "weight")
MESSAGE_KEYS = (
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "weight",
    "train",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as chat templates take it, and the factor of each message's loss: None where the row
    says nothing about it. `answer_from`: assistant messages before it are part of the prompt. `images`: those
    of each message, where there are any at all.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    weights: Sequence[float | None]
    weight: float = 1.0
    answer_from: int = 0
    images: Sequence[Sequence[Image]] = ()

    def factors(self, train_on: str) -> list[float]:
        """A number for each message: its own, or 1 where `train_on` ("all" or "last") takes it; times the
        row's.
        """
        answers = [
            index
            for index, message in enumerate(self.messages)
            if message["role"] == "assistant" and index >= self.answer_from
        ]
        taken = answers if train_on == "all" else answers[-1:]
        return [
            self.weight * (float(index in taken) if own is None else own)
            for index, own in enumerate(self.weights)
        ]


@dataclass(frozen=True, slots=True)
class Completion:
    """A text and how it goes on, without a chat template."""

    prompt: str
    completion: str
    weight: float = 1.0


Row = Chat | Completion


def read(data: Source, name: str, ignore_columns: Sequence[str] = ()) -> list[Row]:
    """All rows, checked. `name` is the argument they came by, for errors.

    InvalidArgument naming row and field, or the file that is not there; MissingDependency for formats whose
    library is not installed.
    """
    rows: list[Row] = []
    for index, raw in enumerate(raw_rows(data, name)):
        field = f"{name}[{index}]"
        if not isinstance(raw, Mapping):
            raise invalid(field, f"a row must be a mapping, not {type(raw).__name__}")
        rows.append(_row({key: raw[key] for key in raw if key not in ignore_columns}, field))
    if not rows:
        raise invalid(name, "the data set has no rows")
    return rows


def _row(raw: Mapping[str, Any], field: str) -> Row:
    # Columnar files have every column in every row; what a row does not say is None there.
    given = {key: value for key, value in raw.items() if value is not None}
    if unknown := sorted(set(given) - set(ROW_KEYS)):
        raise invalid(
            field,
            f"unknown columns {unknown}; a row has {', '.join(ROW_KEYS)}. Name others in ignore_columns",
        )
    weight = _number(given.get("weight", 1.0), f"{field}.weight")
    pair = {"prompt", "completion"} & set(given)
    if "messages" in given and not pair:
        messages, weights, images = _messages(given["messages"], f"{field}.messages")
        return _checked(Chat(messages, _tools(given, field), weights, weight, 0, _any(images)), field)
    if pair != {"prompt", "completion"} or "messages" in given:
        raise invalid(field, f"a row has messages, or prompt and completion; this has {sorted(given)}")
    if isinstance(given["prompt"], str) and isinstance(given["completion"], str):
        if "tools" in given:
            raise invalid(f"{field}.tools", "only conversations have tools, not plain texts")
        return _checked(Completion(given["prompt"], given["completion"], weight), field)
    if isinstance(given["prompt"], str) or isinstance(given["completion"], str):
        raise invalid(field, "prompt and completion must be two texts or two lists of messages")
    prompt, before, seen = _messages(given["prompt"], f"{field}.prompt")
    answer, after, shown = _messages(given["completion"], f"{field}.completion")
    both = _any([*seen, *shown])
    chat = Chat([*prompt, *answer], _tools(given, field), [*before, *after], weight, len(prompt), both)
    return _checked(chat, field)


def _any(images: Sequence[Sequence[Image]]) -> Sequence[Sequence[Image]]:
    return images if any(images) else ()


def _checked(row: Row, field: str) -> Row:
    """InvalidArgument if nothing of a row could be trained on."""
    if isinstance(row, Completion):
        if not row.prompt:
            raise invalid(f"{field}.prompt", "is empty: the first token needs something before it")
        if not row.completion:
            raise invalid(f"{field}.completion", "is empty")
        nothing = row.weight == 0
    else:
        nothing = not any(row.factors("all"))
    if nothing:
        raise invalid(
            field, "nothing of it can be trained on: no assistant message, or weights that are all 0"
        )
    return row


def _messages(
    value: Any, field: str
) -> tuple[list[Mapping[str, Any]], list[float | None], list[Sequence[Image]]]:
    """Messages as chat templates take them, their weights, and their images."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise invalid(field, f"must be a list of messages, not {type(value).__name__}")
    read = [_message(each, f"{field}[{index}]") for index, each in enumerate(value)]
    if not read:
        raise invalid(field, "is empty")
    return [message for message, _, _ in read], [weight for _, weight, _ in read], [each for *_, each in read]


def _message(value: Any, field: str) -> tuple[Mapping[str, Any], float | None, Sequence[Image]]:
    if not isinstance(value, Mapping):
        raise invalid(field, f"a message must be a mapping, not {type(value).__name__}")
    given = {key: item for key, item in value.items() if item is not None}
    if unknown := sorted(set(given) - set(MESSAGE_KEYS)):
        raise invalid(field, f"unknown keys {unknown}; a message has {', '.join(MESSAGE_KEYS)}")
    role = given.get("role")
    if role not in ROLES:
        raise invalid(f"{field}.role", f"{role!r} is none of {', '.join(ROLES)}")
    content = read_content(given.get("content", ""), f"{field}.content")
    if content.images and role == "assistant":
        raise invalid(f"{field}.content", "an assistant message holds an image, and models say text only")
    reasoning = given.get("reasoning_content", "")
    if not isinstance(reasoning, str) or (reasoning and role != "assistant"):
        raise invalid(f"{field}.reasoning_content", "must be a text of an assistant message")
    said = role == "assistant" and (content.text.strip() or reasoning.strip() or given.get("tool_calls"))
    if role == "assistant" and not said:
        raise invalid(f"{field}.content", "an assistant message is empty: no text, reasoning or tool call")
    plain = {name: given[name] for name in ("tool_calls", "tool_call_id", "name") if given.get(name)}
    try:
        message = Message.of({"role": role, "content": content, **plain}).to_dict()
    except (InvalidEpisodeData, KeyError, TypeError, AttributeError) as error:
        raise invalid(field, f"it is malformed: {error!r}") from None
    if reasoning:
        message["reasoning_content"] = reasoning
    return message, _own_weight(given, role, field), content.images


def _own_weight(given: Mapping[str, Any], role: str, field: str) -> float | None:
    if "train" in given and "weight" in given:
        raise invalid(field, "it has both train and weight; give one of them")
    if "train" in given:
        if not isinstance(given["train"], bool):
            raise invalid(f"{field}.train", f"must be true or false, not {given['train']!r}")
        weight = float(given["train"])
    elif "weight" in given:
        weight = _number(given["weight"], f"{field}.weight")
    else:
        return None if role == "assistant" else 0.0
    if weight and role != "assistant":
        raise invalid(field, f"a {role} message cannot be trained on: the model does not produce it")
    return weight


def _tools(given: Mapping[str, Any], field: str) -> list[Mapping[str, Any]] | None:
    tools = given.get("tools")
    if isinstance(tools, str):
        # Columnar files keep schemas, which differ from row to row, as JSON text.
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise invalid(f"{field}.tools", f"is no JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise invalid(f"{field}.tools", "must be a list of tool schemas")
    return list(tools)


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise invalid(field, f"must be a finite number, not {value!r}")
    return float(value)
