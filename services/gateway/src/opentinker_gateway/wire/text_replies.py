"""Choices of plain completions, with the prompt in front of them where it is to be echoed."""

from collections.abc import Sequence
from typing import Any

from opentinker_gateway.application.asks import End, Piece, TextPiece
from opentinker_gateway.domain.sampling import PromptScores, Tokens
from opentinker_gateway.wire.replies import Vocabulary


class TextChoices:
    """Collects the choices of a request, and makes the choices of its chunks."""

    def __init__(
        self,
        prompts: Sequence[str],
        prompt_ids: Sequence[Sequence[int]],
        n: int,
        vocabulary: Vocabulary,
        *,
        echo: bool,
        logprobs: bool,
    ) -> None:
        self._prompts = prompts
        self._prompt_ids = prompt_ids
        self._n = n
        self._vocabulary = vocabulary
        self._echo = echo
        self._logprobs = logprobs
        count = len(prompts) * n
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._ends: list[End | None] = [None] * count
        self._offsets = [0] * count
        self._scores: list[tuple[float, ...]] = [()] * len(prompts)
        self._begun = [False] * count

    def scores(self, prompt: int, scores: PromptScores) -> None:
        """The logprobs of a prompt."""
        self._scores[prompt] = scores.logprobs

    def add(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            self._texts[piece.index].append(piece.text)
        elif isinstance(piece, End):
            self._ends[piece.index] = piece

    def choices(self) -> list[dict[str, Any]]:
        made = []
        for index, end in enumerate(self._ends):
            assert end is not None, "a run ends with the end of each completion"
            text, arrays = self._front(index)
            text += "".join(self._texts[index])
            if arrays is not None:
                arrays = _joined(arrays, self._arrays(index, end.finished.tokens))
            made.append(_choice(index, text, arrays, end.reason))
        return made

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """The choice of a chunk; None where the piece says nothing to the client."""
        if isinstance(piece, TextPiece):
            text, arrays = self._front(piece.index) if not self._begun[piece.index] else ("", self._empty())
            self._begun[piece.index] = True
            if arrays is not None:
                arrays = _joined(arrays, self._arrays(piece.index, piece.tokens))
            if not (text or piece.text or (arrays and arrays["tokens"])):
                return None
            return _choice(piece.index, text + piece.text, arrays, None)
        return _choice(piece.index, "", None, piece.reason) if isinstance(piece, End) else None

    def _front(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """What comes before the completion: the prompt where it is echoed, with its logprobs."""
        arrays = self._empty()
        if not self._echo:
            return "", arrays
        prompt = index // self._n
        if arrays is not None:
            arrays = self._arrays(index, Tokens(tuple(self._prompt_ids[prompt]), self._scores[prompt]))
            arrays["token_logprobs"][0] = None
            arrays["top_logprobs"] = [None] * len(arrays["tokens"])
        return self._prompts[prompt], arrays

    def _empty(self) -> dict[str, Any] | None:
        return self._vocabulary.legacy(Tokens(), 0)[0] if self._logprobs else None

    def _arrays(self, index: int, tokens: Tokens) -> dict[str, Any]:
        arrays, self._offsets[index] = self._vocabulary.legacy(tokens, self._offsets[index])
        return arrays


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: [*values, *second[name]] for name, values in first.items()}


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
