"""The base model's tokenizer files, for callers by digest and for rendering here."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_kit.models import tokenizer_files
from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import ChatTokenizer, RenderError

_APPENDING = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
"""Decoders whose text only grows at its end. Others (WordPiece) tidy up what they wrote before."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class ModelTokenizer:
    """What the service does with a tokenizer. A model without one can still be sampled by token ids."""

    def __init__(self, model_dir: Path) -> None:
        contents = tokenizer_files(model_dir)
        self.files = TokenizerFiles(contents)
        self._chat = ChatTokenizer(contents) if "tokenizer.json" in contents else None
        self.end_token_ids = self._chat.eos_ids if self._chat else _end_ids(contents)
        described = json.loads(contents.get("tokenizer.json", b"{}"))
        decoders = list(_decoders(described.get("decoder")))
        self.appends = all(_appends(decoder) for decoder in decoders)
        """Whether text only grows at its end (`streamed_text`)."""
        added = described.get("added_tokens") or []
        self._special = frozenset(int(token["id"]) for token in added if token.get("special"))
        falls_back = any(decoder.get("type") == "ByteFallback" for decoder in decoders)
        self._bytes = _byte_ids(described) if falls_back else frozenset()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Token ids of a conversation; INVALID_FIELD if the template refuses it."""
        try:
            return self._needed().render(messages, tools, add_generation_prompt)
        except RenderError as error:
            raise ServiceError(Reason.INVALID_FIELD, str(error), field="messages") from error

    def encode(self, text: str) -> list[int]:
        return self._needed().encode(text)

    def decode(self, ids: Sequence[int], keep_special_tokens: bool = False) -> str:
        return self._needed().decode(ids, skip_special_tokens=not keep_special_tokens)

    def text(self, ids: Sequence[int]) -> str:
        """Text of a completion; empty where the model has no tokenizer."""
        return self._chat.decode(ids) if self._chat else ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def is_open(self, token_id: int) -> bool:
        """Whether it is a byte of a run that is decoded as a whole."""
        return token_id in self._bytes

    def _needed(self) -> ChatTokenizer:
        if self._chat is None:
            raise ServiceError(Reason.TOKENIZER_NOT_FOUND, "this model has no tokenizer.json")
        return self._chat


def _end_ids(contents: Mapping[str, bytes]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = json.loads(contents.get(name, b"{}")).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for one in decoder.get("decoders") or []:
            yield from _decoders(one)
    else:
        yield decoder


def _appends(decoder: dict[str, Any]) -> bool:
    return decoder.get("type") in _APPENDING and not decoder.get("stop")


def _byte_ids(described: dict[str, Any]) -> frozenset[int]:
    vocabulary = described.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [text, score]
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    return frozenset(index for text, index in vocabulary.items() if _BYTE.fullmatch(text))
