"""Tokens as bytes: what single tokens stand for, joined, is what their text encodes to."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from opentinkerapi.runtime.render import TOKENIZER_FILE, ChatTokenizer
from opentinkerapi.runtime.token_bytes import TokenBytes, byte_alphabet

TEXT = "naïve 🙂\x00\n\tß日本 ~¡­"


def test_the_alphabet_is_the_one_of_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_byte_level_tokens_join_to_the_text(tiny_model_dir: Path) -> None:
    tokenizer = ChatTokenizer({TOKENIZER_FILE: (tiny_model_dir / TOKENIZER_FILE).read_bytes()})
    ids = tokenizer.encode(TEXT)
    parts = tokenizer.token_bytes(ids)
    assert all(len(part) == 1 for part in parts)
    assert b"".join(parts) == TEXT.encode()
    end = tokenizer.special_tokens["<|im_end|>"]
    assert tokenizer.token_bytes([end, 10**6]) == [b"<|im_end|>", b""]


@pytest.mark.parametrize("text", ["a b", "a🙂"])
def test_byte_tokens_and_metaspace(text: str) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    ids = tokenizer.encode(text).ids
    assert b"".join(TokenBytes(tokenizer).of(ids)) == text.encode()
