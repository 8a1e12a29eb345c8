"""The base model's tokenizer files, for callers by digest and for rendering here."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_kit.models import tokenizer_files
from opentinker_kit.tokenizer_files import TokenizerFiles
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import ChatTokenizer, RenderError


class ModelTokenizer:
    """What the service does with a tokenizer. A model without one can still be sampled by token ids."""

    def __init__(self, model_dir: Path) -> None:
        contents = tokenizer_files(model_dir)
        self.files = TokenizerFiles(contents)
        self._chat = ChatTokenizer(contents) if "tokenizer.json" in contents else None
        self.end_token_ids = self._chat.eos_ids if self._chat else _end_ids(contents)

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
