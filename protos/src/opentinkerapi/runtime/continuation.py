"""What a chat template puts between a reply and the next turn: token in, token out.

What a policy sampled is never tokenized again. A prompt that extends an earlier one is the ids so far and the
tokens found here. Where the template rewrites what came before (it strips reasoning, trims replies, merges
messages) there is no such continuation.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class View:
    """One way of seeing conversations: as ids and as text, each ending where the model speaks."""

    ids: Callable[[Messages], list[int]]
    text: Callable[[Messages], str]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    """With special tokens in the text."""
    end_ids: Collection[int]
    """Tokens that end a reply."""


def continuation(
    view: View, before: Messages, reply: str, reply_ids: Sequence[int], added: Messages
) -> list[int] | None:
    """The ids between a reply and the model's next turn.

    `before` led to the reply, whose ids were sampled; `added` follow it. None where the template does not
    leave `before` and the reply as they were.
    """
    after = [*before, {"role": "assistant", "content": reply}, *added]
    rest = _by_ids(view, before, reply, after)
    if rest is None:
        rest = _by_text(view, before, reply, after)
    # The reply ends with its end token already, where it ended by itself.
    if rest and reply_ids and reply_ids[-1] == rest[0] and rest[0] in view.end_ids:
        rest = rest[1:]
    return rest


def _by_ids(view: View, before: Messages, reply: str, after: Messages) -> list[int] | None:
    """What follows prompt and reply in the rendered conversation, where ids meet at both borders."""
    head = view.ids(before) + view.encode(reply)
    whole = view.ids(after)
    return whole[len(head) :] if whole[: len(head)] == head else None


def _by_text(view: View, before: Messages, reply: str, after: Messages) -> list[int] | None:
    """The same where tokens merge across a border: the text is unaltered, so its last tokens are the rest."""
    head = view.text(before) + reply
    whole_text = view.text(after)
    if not whole_text.startswith(head):
        return None
    rest = whole_text[len(head) :]
    whole = view.ids(after)
    for count in range(1, len(whole) + 1):
        text = view.decode(whole[-count:])
        if text == rest:
            return whole[-count:]
        if len(text) > len(rest):
            break
    return None
