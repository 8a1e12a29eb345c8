"""Prompts from conversations: token ids in, token ids out.

What a policy sampled is never tokenized again. The first prompt is the chat template's; each later one is
the ids so far followed by the tokens that the template puts between the reply and the policy's next turn.
Where the template rewrote what came before (it strips reasoning, trims replies, merges messages) there is
no such continuation: `follow` says so by None, and a new segment begins with a fresh prompt.

Where the template writes one placeholder for an image, the prompt has as many as the model will see.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from opentinker import errors
from opentinker.environments.content import Array, Message
from opentinker.environments.tools import in_words
from opentinker.rollout.formats import CHAT_TEMPLATE, PLAIN_TEXT, formatted
from opentinker.rollout.tool_calls import Parsed, parse
from opentinker.sampling.placing import check_takes_images, place_images
from opentinker.sampling.prompt import Prompt
from opentinkerapi.runtime.continuation import View, continuation
from opentinkerapi.runtime.images import ImageSettings

if TYPE_CHECKING:
    from opentinkerapi.runtime.render import ChatTokenizer

Rendered = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `opentinkerapi.runtime.render.ChatTokenizer` has it."""

    eos_ids: tuple[int, ...]
    images: ImageSettings | None

    @property
    def has_template(self) -> bool: ...

    def render(
        self,
        messages: Rendered,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]: ...

    def render_text(
        self,
        messages: Rendered,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def make_renderer(
    tokenizer: "ChatTokenizer", name: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> "Renderer":
    """The renderer of a name (`formats.NAMES`); "" is the model's own chat template, or plain text where
    it has none. UnsupportedOption where the model cannot speak that format.
    """
    if name == CHAT_TEMPLATE and not tokenizer.has_template:
        text = "the model has no chat template; name another renderer"
        raise errors.UnsupportedOption(text, reason=errors.Reason.UNSUPPORTED_OPTION, field="renderer")
    return Renderer(formatted(tokenizer, name), tools, name)


class Renderer:
    """Renders one conversation format: the model's own chat template, or plain text where it has none."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), name: str = "") -> None:
        """`tools` are schemas that the model is shown, and whose calls are read in its replies."""
        self._tokenizer = tokenizer
        self._name = name
        self._tools = list(tools) or None
        self._tool_names = [str(schema["function"]["name"]) for schema in tools]
        self._instructions = self._tools_in_words()

    @property
    def name(self) -> str:
        """Which format."""
        return self._name or (CHAT_TEMPLATE if self._tokenizer.has_template else PLAIN_TEXT)

    def first(self, messages: Sequence[Message]) -> Prompt:
        """A prompt that ends where the policy speaks.

        UnsupportedOption for images where the model takes none; InvalidArgument for one that is malformed.
        """
        return self._with_images(self._ids(self._opening(messages)), messages)

    def follow(
        self, messages: Sequence[Message], reply: str, reply_ids: Sequence[int], added: Sequence[Message]
    ) -> Prompt | None:
        """What stands between the policy's reply and its next turn.

        `messages` led to the reply, whose ids were sampled; `added` follow it. None where the template does
        not leave `messages` and the reply as they were.
        """
        view = View(
            self._ids,
            self._text,
            self._tokenizer.encode,
            partial(self._tokenizer.decode, skip_special_tokens=False),
            self._tokenizer.eos_ids,
        )
        rest = continuation(view, self._opening(messages), reply, reply_ids, self._dicts(added))
        return None if rest is None else self._with_images(rest, added)

    def parse(self, text: str) -> Parsed:
        """What the model said: text and tool calls. All is text where it has no tools."""
        return parse(text, self._tool_names) if self._tool_names else Parsed(text)

    def _tools_in_words(self) -> str:
        """What a system message must say of the tools, where the chat template does not show them."""
        if self._tools is None:
            return ""
        if not self._tokenizer.has_template:
            return in_words(self._tools)
        probe = [{"role": "user", "content": "?"}]
        shown = self._tokenizer.render_text(probe, self._tools)
        return in_words(self._tools) if shown == self._tokenizer.render_text(probe) else ""

    def _opening(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """A conversation from its beginning, as templates take it."""
        dicts = self._dicts(messages)
        if not self._instructions:
            return dicts
        if dicts and dicts[0]["role"] == "system" and isinstance(dicts[0]["content"], str):
            told = {**dicts[0], "content": f"{dicts[0]['content']}\n\n{self._instructions}"}
            return [told, *dicts[1:]]
        return [{"role": "system", "content": self._instructions}, *dicts]

    def _dicts(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if any(message.content.images for message in messages):
            check_takes_images(self._tokenizer, "the observation", "observation")
        if any(isinstance(part, Array) for message in messages for part in message.content.parts):
            raise errors.UnsupportedOption(
                "the observation holds an array, which no chat template shows; say it in text or JSON",
                reason=errors.Reason.UNSUPPORTED_OPTION,
                field="observation",
            )
        return [message.to_dict() for message in messages]

    def _with_images(self, ids: Sequence[int], messages: Sequence[Message]) -> Prompt:
        """The ids with each placeholder repeated for the places of its image."""
        images = [image for message in messages for image in message.content.images]
        return place_images(ids, images, self._tokenizer, "observation", self.name)

    def _ids(self, messages: Rendered) -> list[int]:
        if self._tokenizer.has_template:
            return self._tokenizer.render(messages, self._tools)
        return self._tokenizer.encode(self._text(messages))

    def _text(self, messages: Rendered) -> str:
        if self._tokenizer.has_template:
            return self._tokenizer.render_text(messages, self._tools)
        # Without a template a conversation is a text that the policy goes on writing: replies follow at once,
        # what others say begins a line.
        texts = [str(message["content"]) for message in messages]
        spoken = [message["role"] == "assistant" for message in messages]
        return "".join(
            text if reply or index == 0 else f"\n{text}"
            for index, (text, reply) in enumerate(zip(texts, spoken, strict=True))
        )
