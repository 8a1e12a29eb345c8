"""Which tokens of a conversation the model has to produce.

What the sampler would be prompted with decides: an assistant turn begins where the prompt ends that the chat
template makes of the messages before it, and ends with the token at which the sampler stops, that token
included. What follows (a newline, the next message) is context. A template with generation tags may leave out
more, never less.

A row must show each turn the history that the sampler will see. Where the template writes an earlier
message differently once others follow it (it strips reasoning, as those of most reasoning models do), one row
cannot hold all turns: this is refused, or the conversation becomes several rows, as the caller decides.
Nothing is ever trained on in a form in which it would not be sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from opentinker.errors import TemplateProblem, invalid

SHOWN = 60
"""Characters of a text that an error shows."""


class Rendering(Protocol):
    """One conversation through a chat template; `opentinkerapi.runtime.render.Rendering` is one."""

    def text(self, count: int | None = None, *, add_generation_prompt: bool = False) -> str: ...

    def tagged(self, count: int | None = None) -> list[tuple[int, int]]: ...

    def ids(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `opentinkerapi.runtime.render.ChatTokenizer` has it."""

    eos_ids: tuple[int, ...]

    @property
    def has_template(self) -> bool: ...

    def rendering(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Rendering: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A row of n tokens. `weights` [n]: the factor of each token's loss; 0 where it is context. `messages`:
    how many of the conversation it holds.
    """

    token_ids: list[int]
    weights: list[float]
    messages: int = 0


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str, weight: float) -> Encoded:
    """Plain text, without a chat template: the completion and the end token are trained on.

    The two are tokenized apart, as they are when the model is prompted and answers: no token spans the
    border.
    """
    context, reply = tokenizer.encode(prompt), tokenizer.encode(completion)
    reply = [*reply, _end_token(tokenizer)]
    return Encoded(context + reply, [0.0] * len(context) + [weight] * len(reply))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    weights: Sequence[float],
    rewritten_history: Literal["refuse", "split"] = "refuse",
) -> list[Encoded]:
    """The rows of a conversation: one, or several where its history is rewritten and may be split.

    `weights` has one number a message; those of assistant turns that are trained on are not 0. Tokens after
    the last of them are left out: they have no part in the loss. TemplateProblem where the template cannot be
    trained with as asked; RenderError where it refuses the messages.
    """
    trained = [index for index, weight in enumerate(weights) if weight]
    if not tokenizer.has_template:
        if tools:
            raise TemplateProblem.of("the model has no chat template that could show it tools")
        return [_plain(tokenizer, messages[: trained[-1] + 1], weights)]
    view = tokenizer.rendering(messages, tools)
    ends = [view.decode([token]) for token in tokenizer.eos_ids]
    rows = []
    left = trained
    while left:
        turns, left = _together(view, left, ends, rewritten_history)
        rows.append(_row(view, turns, weights))
    return rows[::-1]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant turn as it is sampled: its prompt, and the text with it up to the end token."""

    message: int
    prompt: str
    text: str


def _together(
    view: Rendering, trained: Sequence[int], ends: Sequence[str], rewritten_history: str
) -> tuple[list[_Turn], list[int]]:
    """The last turn with all before it that one text holds as they are sampled; and the others."""
    last = _turn(view, trained[-1], ends)
    turns, left = [last], []
    for message in reversed(trained[:-1]):
        turn = _turn(view, message, ends)
        if last.text.startswith(turn.text):
            turns.append(turn)
        elif rewritten_history == "split":
            left.append(message)
        else:
            raise TemplateProblem.of(
                f"the chat template writes messages[0:{message + 1}] differently once others follow: "
                f"{_difference(turn.text, last.text)}. One row cannot show every turn what the sampler "
                f'will see. rewritten_history="split" makes several rows of such a conversation; '
                f'train_on="last" trains on its last turn only'
            )
    return turns[::-1], left[::-1]


def _turn(view: Rendering, message: int, ends: Sequence[str]) -> _Turn:
    prompt = view.text(message, add_generation_prompt=True)
    through = view.text(message + 1)
    if not through.startswith(prompt):
        raise TemplateProblem.of(
            f"the chat template prompts for messages[{message}] in one way and writes it in another: "
            f"{_difference(prompt, through)}. A model trained on the second is never asked so"
        )
    stop = len(prompt) + _stop(through[len(prompt) :], ends, message)
    return _Turn(message, prompt, through[:stop])


def _stop(said: str, ends: Sequence[str], message: int) -> int:
    """Where in what is said the sampler stops: behind the first end token."""
    found = [(said.find(end), end) for end in ends if end and end in said]
    if not found:
        raise TemplateProblem.of(
            f"the chat template ends messages[{message}] with {_tail(said)} and with none of the model's end "
            f"tokens ({', '.join(map(repr, ends)) or 'it has none'}): a model trained so never stops"
        )
    at, end = min(found)
    rest = said[at + len(end) :]
    if rest.strip():
        raise TemplateProblem.of(
            f"the chat template writes {_tail(rest)} behind the end token {end!r} of messages[{message}], "
            f"where a sampler has stopped"
        )
    return at + len(end)


def _row(view: Rendering, turns: Sequence[_Turn], weights: Sequence[float]) -> Encoded:
    """Ids and weights of a text that ends with the last of its turns."""
    assembly = _Assembly(view, turns[-1].text)
    tags = view.tagged(turns[-1].message + 1)
    factors: list[float] = []
    for turn in turns:
        start = assembly.border(len(turn.prompt))
        kept = _tagged(assembly, turn, tags) if tags else None
        end = assembly.border(len(turn.text))
        factors += [0.0] * (start - len(factors))
        factors += [
            # The end token is the model's to say whatever the tags leave out.
            weights[turn.message] if kept is None or index in kept or index == end - 1 else 0.0
            for index in range(start, end)
        ]
    return Encoded(assembly.finish(), factors, turns[-1].message + 1)


def _tagged(assembly: "_Assembly", turn: _Turn, tags: Sequence[tuple[int, int]]) -> set[int]:
    """Tokens of a turn that stand in generation tags."""
    begin, stop = len(turn.prompt), len(turn.text)
    touching = sorted((a, b) for a, b in tags if a < stop and b > begin)
    if not touching:
        raise TemplateProblem.of(
            f"the chat template has generation tags and none around messages[{turn.message}]"
        )
    kept: set[int] = set()
    for a, b in touching:
        if a < begin:
            raise TemplateProblem.of(
                f"a generation tag of the chat template stands around {_tail(turn.prompt[a:])}, with which "
                f"the sampler is prompted, before messages[{turn.message}]"
            )
        first, last = assembly.within(a), assembly.within(min(b, stop))
        if first is None or last is None:
            raise TemplateProblem.of(
                f"a generation tag of the chat template begins or ends within a token of "
                f"messages[{turn.message}]"
            )
        kept.update(range(first, last))
    return kept


class _Assembly:
    """The ids of a text in which given borders lie between two tokens.

    Mostly they do when the whole text is tokenized at once. Where tokens would merge across a border, the
    text is tokenized anew from there, as it is when a prompt ends at that border.
    """

    def __init__(self, view: Rendering, text: str) -> None:
        self._view = view
        self._text = text
        self._ids: list[int] = []
        self._from = 0
        self._rest = view.ids(text)

    def within(self, place: int) -> int | None:
        """The token that begins at a place, counted in characters; None if a token spans it."""
        head = self._view.ids(self._text[self._from : place])
        return len(self._ids) + len(head) if self._rest[: len(head)] == head else None

    def border(self, place: int) -> int:
        """The same for a place where a token has to begin. Each border lies behind the one before."""
        token = self.within(place)
        if token is None:
            self._ids += self._view.ids(self._text[self._from : place])
            self._from = place
            self._rest = self._view.ids(self._text[place:])
            token = len(self._ids)
        return token

    def finish(self) -> list[int]:
        """All ids."""
        ids = self._ids + self._rest
        if self._from and self._view.decode(ids) != self._view.decode(self._view.ids(self._text)):
            raise TemplateProblem.of(
                "tokens merge across the border between a prompt and the reply, and the tokenizer does not "
                "let them be told apart"
            )
        return ids


def _plain(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Encoded:
    """A model without a chat template: a text that it goes on writing, as `rollout.renderer` prompts it.

    Replies follow at once, what others say begins a line; each reply ends with the end token.
    """
    ids: list[int] = []
    factors: list[float] = []
    context = ""
    for index, message in enumerate(messages):
        content = str(message["content"])
        if message["role"] != "assistant":
            context += f"\n{content}" if index else content
            continue
        before = tokenizer.encode(context) if context else []
        reply = [*tokenizer.encode(content), _end_token(tokenizer)]
        ids += before + reply
        factors += [0.0] * len(before) + [weights[index]] * len(reply)
        context = ""
    return Encoded(ids, factors)


def _end_token(tokenizer: Tokenizer) -> int:
    if not tokenizer.eos_ids:
        raise invalid("model", "it names no end token, so a model trained on replies would never stop")
    return tokenizer.eos_ids[0]


def _difference(first: str, second: str) -> str:
    """What two texts have where they begin to differ."""
    pairs = zip(first, second, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    shown = [repr(text[at : at + SHOWN]) for text in (first, second)]
    return f"{shown[0]} becomes {shown[1]}"


def _tail(text: str) -> str:
    return repr(text[-SHOWN:])
