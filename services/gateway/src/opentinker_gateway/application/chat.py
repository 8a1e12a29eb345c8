"""Chat completions."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from opentinker_gateway.application.asks import (
    Ask,
    CallPiece,
    End,
    Piece,
    Run,
    TextPiece,
    accepted,
    call_id,
)
from opentinker_gateway.application.recording import check_model, decided, in_use, one_reply, played
from opentinker_gateway.domain.book import Entry
from opentinker_gateway.domain.episodes import Turn
from opentinker_gateway.domain.messages import Call, Message
from opentinker_gateway.domain.prompts import Setting
from opentinker_gateway.domain.sampling import Delta, Event, Finished, SamplingOptions, StopReason, Tokens
from opentinker_gateway.domain.tools import OPEN, BareCalls, Splitter, ToolFormat, splitter
from opentinker_gateway.ports import Model, Models
from opentinker_gateway.wire import options as read
from opentinker_gateway.wire.bodies import ChatBody
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class Chat:
    """Answers chats."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def answer(self, body: ChatBody, ask: Ask) -> tuple[Run[Piece], Model]:
        """Begin to answer. What is wrong with the request is raised here."""
        if ask.entry is not None:
            with in_use(ask.entry, ask.retry):
                return await self._recorded(body, ask, ask.entry)
        model = await self._models.open(body.model, ask.caller)
        options = read.chat_options(body, model.fields)
        setting = read.setting(body)
        messages = read.messages(body)
        ids = model.prompts.first(messages, setting)
        options, ids, form = _forced(body, options, ids, model, setting)
        request_id = ask.request_id("chat")
        events = model.sample(
            ids,
            options,
            n=body.n,
            request_id=request_id,
            conversation=body.prompt_cache_key or _beginning(messages, setting),
            keep=ask.repeatable,
        )
        started = await _accepted(events)
        speech = _Speech(request_id, body.n, setting, form)
        return Run(request_id, started, model.weights, speech.pieces(events)), model

    async def _recorded(self, body: ChatBody, ask: Ask, entry: Entry) -> tuple[Run[Piece], Model]:
        check_model(entry, body.model)
        one_reply(body.n)
        if read.forced_tool(body) is not None:
            text = "a recorded episode lets the model choose whether it calls a tool"
            raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tool_choice")
        model = await self._models.open(entry.episode.weights, entry.creator)
        options = decided(entry, read.chat_options(body, model.fields))
        setting = read.setting(body)
        turn = entry.episode.chat_turn(
            read.messages(body), setting, options, model.prompts, ask.retry, is_retry=ask.is_retry
        )
        events = played(entry, turn, model)
        started = await _accepted(events)
        base = f"{entry.episode.id}-{turn.ordinal}"
        speech = _Speech(base, 1, setting, model.prompts.tool_format)
        return Run(base, started, model.weights, _keeping(entry, turn, speech, events)), model


async def _keeping(
    entry: Entry, turn: Turn, speech: "_Speech", events: AsyncGenerator[Event, None]
) -> AsyncGenerator[Piece, None]:
    """The pieces of a recorded reply, which is kept before its end is told."""
    with in_use(entry, turn.retry):
        async with contextlib.aclosing(speech.pieces(events)) as pieces:
            async for piece in pieces:
                if isinstance(piece, End):
                    entry.episode.record(turn, piece.finished, speech.message(0))
                yield piece


class _Speech:
    """Takes the n replies of a request apart into text and calls."""

    def __init__(self, base: str, n: int, setting: Setting, form: ToolFormat | None) -> None:
        """`form`: None where a reply is one call that the model was held to."""
        names = {tool["function"]["name"] for tool in setting.tools}
        self._base = base
        self._splitters: list[Splitter] = [
            BareCalls(names) if form is None else splitter(form, names) for _ in range(n)
        ]
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._calls: list[list[Call]] = [[] for _ in range(n)]

    async def pieces(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Piece, None]:
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    pieces = self._take(event.index, self._splitters[event.index].feed(event.text))
                    for piece in _with_tokens(pieces, event.index, event.tokens):
                        yield piece
                elif isinstance(event, Finished):
                    for piece in self._take(event.index, self._splitters[event.index].finish()):
                        yield piece
                    yield End(event.index, self._reason(event), event)
                else:
                    yield event  # type: ignore[misc]

    def message(self, index: int) -> Message:
        """The reply as its caller gets it."""
        return Message("assistant", "".join(self._texts[index]), tuple(self._calls[index]))

    def _take(self, index: int, split: list[str | Call]) -> list[Piece]:
        pieces: list[Piece] = []
        for part in split:
            if isinstance(part, str):
                self._texts[index].append(part)
                pieces.append(TextPiece(index, part, Tokens()))
                continue
            calls = self._calls[index]
            call = dataclasses.replace(part, id=call_id(self._base, index, len(calls)))
            calls.append(call)
            pieces.append(CallPiece(index, len(calls) - 1, call))
        return pieces

    def _reason(self, finished: Finished) -> str:
        if finished.stop_reason is StopReason.CANCELLED:
            raise ServiceError(Reason.CANCELLED, "the reply was cancelled")
        if finished.stop_reason is StopReason.LENGTH:
            return "length"
        return "tool_calls" if self._calls[finished.index] else "stop"


def _with_tokens(pieces: list[Piece], index: int, tokens: Tokens) -> list[Piece]:
    """Tokens are told when they come; the text that they belong to may be held back."""
    if not tokens.ids:
        return pieces
    if pieces and isinstance(pieces[0], TextPiece):
        return [TextPiece(index, pieces[0].text, tokens), *pieces[1:]]
    return [TextPiece(index, "", tokens), *pieces]


def _forced(
    body: ChatBody, options: SamplingOptions, ids: list[int], model: Model, setting: Setting
) -> tuple[SamplingOptions, list[int], ToolFormat | None]:
    """Where a tool must be called the engine is held to the schema of a call, behind its opening tag."""
    form = model.prompts.tool_format if setting.tools else ToolFormat.TAGGED
    name = read.forced_tool(body)
    if name is None:
        return options, ids, form
    if "json_schema" not in model.fields:
        text = "tool_choice: the engine that serves this model cannot be held to a call; use 'auto'"
        raise ServiceError(Reason.UNSUPPORTED_OPTION, text, field="tool_choice")
    allowed = [
        _call_schema(tool["function"]) for tool in setting.tools if name in ("", tool["function"]["name"])
    ]
    if form is ToolFormat.TAGGED:
        ids = [*ids, *model.prompts.tokenizer.encode(OPEN + "\n")]
    return dataclasses.replace(options, json_schema=json.dumps({"anyOf": allowed})), ids, None


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _beginning(messages: list[Message], setting: Setting) -> str:
    """Tells conversations apart by what they begin with, up to the first thing that a user says."""
    first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
    facts = [setting.facts(), [message.facts() for message in messages[: first + 1]]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


async def _accepted(events: AsyncGenerator[Event, None]) -> Any:
    try:
        return await accepted(events)
    except BaseException:
        await events.aclose()
        raise
