"""Replies as OpenAI's clients know them: objects, and chunks of a stream."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from opentinker_gateway.application.asks import CallPiece, End, Piece, TextPiece
from opentinker_gateway.domain.messages import Call
from opentinker_gateway.domain.sampling import Started, Tokens
from opentinkerapi.runtime.render import ChatTokenizer

LEAST_LOGPROB = -9999.0
"""What OpenAI says for a token that cannot be sampled; JSON has no infinity."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


class Vocabulary:
    """Tokens as replies show them."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [each.decode(errors="replace") for each in self._tokenizer.token_bytes(ids)]

    def chat(self, tokens: Tokens) -> list[dict[str, Any]]:
        """An entry for each sampled token, the one that ends the reply included."""
        entries = []
        for i, (token_id, logprob) in enumerate(zip(tokens.ids, tokens.logprobs, strict=True)):
            top = tokens.top[i] if tokens.top else ()
            likeliest = [self._entry(each.token_id, each.logprob) for each in top]
            entries.append({**self._entry(token_id, logprob), "top_logprobs": likeliest})
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        (data,) = self._tokenizer.token_bytes([token_id])
        return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}

    def legacy(self, tokens: Tokens, offset: int) -> tuple[dict[str, Any], int]:
        """The arrays of plain completions; `offset` is where the text of the first token begins."""
        texts = self.texts(tokens.ids)
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [
            dict(
                zip(
                    self.texts([each.token_id for each in row]),
                    [finite(each.logprob) for each in row],
                    strict=True,
                )
            )
            for row in tokens.top
        ]
        arrays = {
            "tokens": texts,
            "token_logprobs": [finite(logprob) for logprob in tokens.logprobs],
            "top_logprobs": top or [{} for _ in texts],
            "text_offset": offsets,
        }
        return arrays, offset


class Envelope:
    """What every object and chunk of one answer begins with."""

    def __init__(self, prefix: str, run_id: str, kind: str, created: int, model: str, weights: str) -> None:
        self._head = {
            "id": f"{prefix}-{run_id}",
            "object": kind,
            "created": created,
            "model": model,
            # Which weights answered, where the name stands for several over time.
            "system_fingerprint": weights,
        }

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": list(choices), "usage": dict(usage)}

    def chunk(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None, wanted: bool
    ) -> bytes:
        """`wanted`: the client asked for usage, so that every chunk has the field."""
        chunk: dict[str, Any] = {**self._head, "choices": list(choices)}
        if wanted:
            chunk["usage"] = usage
        return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


class ChatChoices:
    """Collects the replies of a chat."""

    def __init__(self, n: int, vocabulary: Vocabulary, *, logprobs: bool) -> None:
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._calls: list[list[Call]] = [[] for _ in range(n)]
        self._ends: list[End | None] = [None] * n
        self._vocabulary = vocabulary
        self._logprobs = logprobs

    def add(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            self._texts[piece.index].append(piece.text)
        elif isinstance(piece, CallPiece):
            self._calls[piece.index].append(piece.call)
        elif isinstance(piece, End):
            self._ends[piece.index] = piece

    def choices(self) -> list[dict[str, Any]]:
        made = []
        for index, end in enumerate(self._ends):
            assert end is not None, "a run ends with the end of each reply"
            calls = self._calls[index]
            text = "".join(self._texts[index])
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text if text or not calls else None,
                "refusal": None,
            }
            if calls:
                message["tool_calls"] = [_call(call) for call in calls]
            logprobs = {"content": self._vocabulary.chat(end.finished.tokens), "refusal": None}
            made.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": logprobs if self._logprobs else None,
                    "finish_reason": end.reason,
                }
            )
        return made


def chat_delta(piece: Piece, vocabulary: Vocabulary, *, logprobs: bool) -> dict[str, Any] | None:
    """The choice of a chunk; None where the piece says nothing to the client."""
    if isinstance(piece, TextPiece):
        if not piece.text and not (logprobs and piece.tokens.ids):
            return None
        said = {"content": vocabulary.chat(piece.tokens), "refusal": None} if logprobs else None
        return _chat_choice(piece.index, {"content": piece.text}, said)
    if isinstance(piece, CallPiece):
        call = {"index": piece.number, **_call(piece.call)}
        return _chat_choice(piece.index, {"tool_calls": [call]}, None)
    if isinstance(piece, End):
        return {**_chat_choice(piece.index, {}, None), "finish_reason": piece.reason}
    return None


def first_delta(index: int) -> dict[str, Any]:
    """The choice of the first chunk: who speaks."""
    return _chat_choice(index, {"role": "assistant", "content": "", "refusal": None}, None)


def _chat_choice(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage(started: Sequence[Started], completion_tokens: int) -> dict[str, Any]:
    """Tokens read and sampled."""
    prompt_tokens = sum(each.prompt_tokens for each in started)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in started)},
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
