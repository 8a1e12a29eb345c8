"""Prompts from conversations, by a model's chat template.

Templates differ in what they know of tools. One that shows the tools it is given is used as it is. For one
that ignores them the gateway writes tools, calls and results into ordinary messages, so that every model can
be offered tools (whether it understands them is the model's affair).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from opentinker_gateway.domain.messages import Message
from opentinker_gateway.domain.tools import OPEN, ToolFormat, call_text
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.continuation import View, continuation
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import ChatTokenizer, RenderError

_PROBE = "tool_that_only_a_probe_names"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that its caller does not set."""

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a conversation is held under: the tools on offer and the template's further variables."""

    tools: tuple[Tool, ...] = ()
    options: Mapping[str, Any] | None = None

    def facts(self) -> object:
        """What must be equal for one conversation to continue another."""
        return [list(self.tools), dict(self.options or {})]


class ChatPrompts:
    """Renders for one model."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._knows_tools: bool | None = None
        self._format: ToolFormat | None = None

    @property
    def knows_tools(self) -> bool:
        """Whether the template shows the tools that it is given."""
        if self._knows_tools is None:
            shown = self._probe([{"role": "user", "content": "x"}], [_PROBE_TOOL])
            self._knows_tools = _PROBE in shown
        return self._knows_tools

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls, as its template shows them."""
        if self._format is None:
            call = {"type": "function", "function": {"name": _PROBE, "arguments": {}}}
            said = {"role": "assistant", "content": "", "tool_calls": [{"id": "123456789", **call}]}
            text = self._probe([{"role": "user", "content": "x"}, said], [_PROBE_TOOL])
            tagged = not self.knows_tools or OPEN in text
            self._format = ToolFormat.TAGGED if tagged else ToolFormat.BARE
        return self._format

    def first(self, messages: Sequence[Message], setting: Setting) -> list[int]:
        """Ids [n] of a prompt that ends where the model speaks. INVALID_FIELD, naming `messages`, where the
        template refuses them.
        """
        return self._view(setting).ids(self._dicts(messages, setting))

    def follow(
        self,
        before: Sequence[Message],
        reply: str,
        reply_ids: Sequence[int],
        added: Sequence[Message],
        setting: Setting,
    ) -> list[int] | None:
        """Ids between a reply, which was sampled as `reply_ids` with the text `reply`, and the next turn.
        None where the template does not leave what came before as it was.
        """
        try:
            return continuation(
                self._view(setting),
                self._dicts(before, setting),
                reply,
                reply_ids,
                self._dicts(added, Setting()),
            )
        except ServiceError:
            # The template takes the conversation only as it stands now.
            return None

    def _view(self, setting: Setting) -> View:
        tools = [dict(tool) for tool in setting.tools] if self.knows_tools and setting.tools else None
        tokenizer, options = self.tokenizer, setting.options

        def ids(messages: Sequence[Mapping[str, Any]]) -> list[int]:
            with _refusals():
                return tokenizer.render(messages, tools, options=options)

        def text(messages: Sequence[Mapping[str, Any]]) -> str:
            with _refusals():
                return tokenizer.render_text(messages, tools, options=options)

        decode = partial(tokenizer.decode, skip_special_tokens=False)
        return View(ids, text, tokenizer.encode, decode, tokenizer.eos_ids)

    def _dicts(self, messages: Sequence[Message], setting: Setting) -> list[dict[str, Any]]:
        if self.knows_tools:
            return _plain(messages)
        written = [_without_tools(message) for message in messages]
        if setting.tools:
            offer = _offer(setting.tools)
            if written and written[0]["role"] == "system":
                written[0] = {"role": "system", "content": f"{written[0]['content']}\n\n{offer}"}
            else:
                written.insert(0, {"role": "system", "content": offer})
        return written

    def _probe(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        try:
            return self.tokenizer.render_text(messages, tools)
        except RenderError:
            return ""


class _refusals:
    """Turns a template's refusal into an error of the request."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RenderError | UnicodeEncodeError):
            raise ServiceError(Reason.INVALID_FIELD, f"messages: {error}", field="messages") from error


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.for_template() for message in messages]


def _without_tools(message: Message) -> dict[str, Any]:
    """The message for a template that knows neither calls nor results."""
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    texts = [message.content] if message.content else []
    return {"role": message.role, "content": "\n".join([*texts, *map(call_text, message.calls)])}


def _offer(tools: Sequence[Tool]) -> str:
    described = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"These tools can be called, each described by one line of JSON:\n{described}\n\n"
        'To call one, say nothing but <tool_call>\n{"name": <its name>, "arguments": <an object>}\n'
        "</tool_call>. What it returns comes next, between <tool_response> and </tool_response>."
    )
