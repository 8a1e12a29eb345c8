"""Stop strings and bad words: where an engine has to look at text although it works on token ids."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason


class Text:
    """The model's tokenizer, for engines that have none of their own. Loaded on first use."""

    def __init__(self, model_dir: Path) -> None:
        self._path = model_dir / "tokenizer.json"
        self._loaded: Tokenizer | None = None

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._loaded is None:
            if not self._path.exists():
                raise ServiceError(
                    Reason.UNSUPPORTED_OPTION,
                    "the model has no tokenizer.json, so stop strings and bad words cannot be honoured",
                )
            self._loaded = Tokenizer.from_file(str(self._path))
            self._loaded.no_padding()
            self._loaded.no_truncation()
        return self._loaded

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The token sequences that spell each word, at the start of a text and after a space."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = word.lstrip()
            for text in (bare, f" {bare}"):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


class StopStrings:
    """Watches one completion for its stop strings.

    Only the tail that can hold a new match is decoded, so a long completion costs no more a token than a
    short one. A match may begin or end inside a token, and a character may span several tokens.
    """

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = tuple(stops)
        # A token holds at least one byte, a character at most four; some room for a decoder that treats the
        # first token of a text in its own way.
        self._window = 4 * max((len(stop) for stop in stops), default=0) + 8

    def match(self, ids: Sequence[int]) -> str:
        """The stop string that the last token of `ids` completed, the earliest in the text; "" if none."""
        if not self._stops:
            return ""
        tail = self._text.decode(ids[-self._window :])
        found = [(tail.find(stop), -len(stop), stop) for stop in self._stops if stop in tail]
        return min(found)[2] if found else ""
