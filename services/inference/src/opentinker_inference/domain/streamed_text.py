"""The text of a completion while it is sampled: only what no later token can change or take back.

A character may span several tokens, and a stop string may begin in what is the last token now. What is given
out, joined, is the completion's text.
"""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_WINDOW = 24
"""Tokens decoded at once, at most; then the earlier ones are left behind."""
_KEEP = 8
_CHARACTER = 4
"""Most bytes of a character, and so most tokens that it spans."""


class Decoder(Protocol):
    """What is known of a tokenizer."""

    @property
    def appends(self) -> bool:
        """Whether text only grows at its end, apart from a character that is not whole."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Decoded, without special tokens."""
        ...

    def is_special(self, token_id: int) -> bool: ...

    def is_open(self, token_id: int) -> bool:
        """Whether the token's text depends on what follows: one byte of a run that is decoded as a whole."""
        ...


class StreamedText:
    """Text of one completion. `add` tokens as they come; `rest` once its whole text is known."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._open: list[int] = []
        """Tokens that are not decoded yet, for what follows decides what they are."""
        self._window: list[int] = []
        self._certain = 0
        """Characters of the window's text that were taken."""
        self._held = ""
        """Taken, and perhaps the beginning of a stop string."""
        self._given = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that became certain."""
        if not self._decoder.appends:
            return ""
        for token in ids:
            if self._decoder.is_special(token):
                continue
            self._open.append(token)
            if not self._decoder.is_open(token):
                self._window += self._open
                self._open.clear()
        text = self._decoder.text(self._window)
        # An unfinished character shows as one replacement at the end.
        end = len(text) - text.endswith(_REPLACEMENT)
        if end > self._certain:
            self._held += text[self._certain : end]
            self._certain = end
        if len(self._window) > _WINDOW:
            self._roll(text)
        return self._give(len(self._held) - self._swallowed())

    def rest(self, whole: str) -> str:
        """What is missing of the text of the finished completion."""
        return whole[self._given :]

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self._given += count
        return given

    def _swallowed(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        most = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(most, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _roll(self, text: str) -> None:
        """Leave tokens behind at a place where no character is cut in two.

        One token before that place stays: some decoders treat the first token of a text in a way of their
        own. A place is right if the two sides, decoded apart, join to the whole.
        """
        for place in range(len(self._window) - _KEEP, len(self._window) - _KEEP - _CHARACTER, -1):
            before = self._decoder.text(self._window[:place])
            context = self._decoder.text(self._window[place - 1 : place])
            after = self._decoder.text(self._window[place - 1 :])
            joins = after.startswith(context) and before + after[len(context) :] == text
            if joins and len(before) <= self._certain:
                self._certain += len(context) - len(before)
                del self._window[: place - 1]
                return
