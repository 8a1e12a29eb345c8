"""The bytes that single tokens stand for. The text of one token may be part of a character and so no text."""

import json
import re
from collections.abc import Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves, the
    others for those from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenBytes:
    """Reads a vocabulary's tokens as bytes: byte-level, with byte tokens like <0x0A>, or plain text."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is of the library `tokenizers`."""
        self._tokenizer = tokenizer
        decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"), ensure_ascii=False)
        self._alphabet = byte_alphabet() if '"ByteLevel"' in decoder else {}
        self._metaspace = "\u2581" in decoder
        self._added = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def of(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token; empty for an id that the tokenizer does not know."""
        return [self._one(token_id) for token_id in ids]

    def _one(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet:
            return bytes(self._alphabet[char] for char in piece if char in self._alphabet)
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(found[1])
        return str(piece.replace("\u2581", " ") if self._metaspace else piece).encode()
