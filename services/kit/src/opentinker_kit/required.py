"""Enforces `(google.api.field_behavior) = REQUIRED`, in a message and everything below it.

What is checked for a message type is worked out once from its descriptor. Missing means: unset, or for what
has no presence its zero value (an empty string, bytes or list, 0, an enum's zero); numbers that may be 0 are
not declared REQUIRED. Members of a oneof are checked only as far as what is set; that some member must be set
is for the handler to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from google.api import field_behavior_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_MAX_VIOLATIONS = 12
_OWN = "checks_its_messages"

F = TypeVar("F")


def checks_its_messages(handler: F) -> F:
    """Marks the handler of a stream whose messages hold many calls: what one of them lacks is the answer to
    that call (the handler uses `check_required`) and does not end the stream.
    """
    setattr(handler, _OWN, True)
    return handler


def is_checked_by(handler: object) -> bool:
    """Whether a handler checks the messages of its stream by itself."""
    return bool(getattr(handler, _OWN, False))


@dataclass(frozen=True, slots=True)
class _Required:
    name: str
    repeated: bool
    has_presence: bool


@dataclass(frozen=True, slots=True)
class _Child:
    name: str
    repeated: bool
    is_map: bool


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to look at in one message type; both empty: nothing below it is required."""

    required: tuple[_Required, ...]
    children: tuple[_Child, ...]


def check_required(message: Message) -> None:
    """Raise ServiceError REQUIRED_FIELD naming every required field that is missing (up to 12)."""
    if _is_complete(message):
        return
    missing: list[str] = []
    for path in _missing(message, ""):
        missing.append(path)
        if len(missing) == _MAX_VIOLATIONS:
            break
    if missing:
        names = ", ".join(missing)
        raise ServiceError(
            Reason.REQUIRED_FIELD,
            f"{'field' if len(missing) == 1 else 'fields'} {names} must be set",
            violations=[(path, "must be set") for path in missing],
        )


def _is_complete(message: Message) -> bool:
    # Almost every message is; finding out costs less than naming what is missing.
    plan = _plan(message.DESCRIPTOR)
    for field in plan.required:
        if not _is_set(message, field):
            return False
    for child in plan.children:
        if not child.repeated:
            if message.HasField(child.name) and not _is_complete(getattr(message, child.name)):
                return False
            continue
        below = getattr(message, child.name)
        for item in below.values() if child.is_map else below:
            if not _is_complete(item):
                return False
    return True


def _missing(message: Message, prefix: str) -> Iterator[str]:
    plan = _plan(message.DESCRIPTOR)
    for field in plan.required:
        if not _is_set(message, field):
            yield prefix + field.name
    for child in plan.children:
        for path, item in _items(message, child):
            yield from _missing(item, f"{prefix}{path}.")


def _items(message: Message, child: _Child) -> Iterator[tuple[str, Message]]:
    name = child.name
    value: Any = getattr(message, name)
    if child.is_map:
        for key in value:
            yield f"{name}[{key!r}]", value[key]
    elif child.repeated:
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item
    elif message.HasField(name):
        yield name, value


def _is_set(message: Message, field: _Required) -> bool:
    if field.has_presence:
        return message.HasField(field.name)
    value = getattr(message, field.name)
    return len(value) > 0 if field.repeated else bool(value)


@cache
def _plan(descriptor: Descriptor) -> _Plan:
    return _Plan(
        required=tuple(
            _Required(field.name, field.is_repeated, field.has_presence)
            for field in descriptor.fields
            if _is_required(field)
        ),
        children=tuple(
            _Child(field.name, field.is_repeated, _is_map(field))
            for field in descriptor.fields
            if (below := _message_below(field)) is not None and _needs_looking(below)
        ),
    )


@cache
def _needs_looking(descriptor: Descriptor) -> bool:
    """Whether any field in or below this message type is required."""
    seen: set[str] = set()
    waiting = [descriptor]
    while waiting:
        current = waiting.pop()
        if current.full_name in seen:
            continue
        seen.add(current.full_name)
        for field in current.fields:
            if _is_required(field):
                return True
            if (below := _message_below(field)) is not None:
                waiting.append(below)
    return False


def _is_required(field: FieldDescriptor) -> bool:
    options: Any = field.GetOptions()
    behaviors = options.Extensions[field_behavior_pb2.field_behavior]
    in_choice = field.containing_oneof is not None and len(field.containing_oneof.fields) > 1
    return field_behavior_pb2.REQUIRED in behaviors and not in_choice


def _is_map(field: FieldDescriptor) -> bool:
    message = field.message_type
    return message is not None and bool(message.GetOptions().map_entry)


def _message_below(field: FieldDescriptor) -> Descriptor | None:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        below: Descriptor | None = message.fields_by_name["value"].message_type
        return below
    return message
