"""Text while it is sampled: whole characters, nothing of a stop string, together the completion's text."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from opentinker_inference.adapters.tokenizer import ModelTokenizer
from opentinker_inference.domain.sampling import cut_at_stop
from opentinker_inference.domain.streamed_text import StreamedText

SMILE = "\N{GRINNING FACE}"
CHARACTERS = "aé語" + SMILE + "b "


class Bytes:
    """A tokenizer of one token a byte; 256 is special."""

    appends = True

    def __init__(self) -> None:
        self.decoded = 0
        """Tokens decoded so far, to see what streaming costs."""

    def text(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def is_open(self, token_id: int) -> bool:
        return False


def streamed(decoder: Bytes | ModelTokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Texts given out for runs of tokens of these lengths, and the rest."""
    text = StreamedText(decoder, ())
    pieces, at = [], 0
    for cut in (*cuts, len(ids)):
        pieces.append(text.add(ids[at : at + cut]))
        at += cut
    return [*pieces, text.rest(decoder.text(ids))]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(CHARACTERS).map(lambda c: list(c.encode())),
            st.integers(128, 256).map(lambda b: [b]),
            st.integers(240, 244).map(lambda b: [b]),
        ),
        max_size=60,
    ),
    st.lists(st.integers(0, 5), max_size=200),
)
@example([[0xF0], [0x9F], [256], [0x98], [0x80]], [1, 1, 1, 1])
@example([[0xF0]] * 60, [1] * 60)
def test_b73_pieces_join_to_the_text_whatever_the_bytes(runs: list[list[int]], cuts: list[int]) -> None:
    ids = [token for run in runs for token in run]
    assert "".join(streamed(Bytes(), ids, cuts)) == Bytes().text(ids)


def test_b73_an_emoji_over_four_tokens_comes_whole() -> None:
    ids = list(f"a{SMILE}b".encode())
    assert streamed(Bytes(), ids, [1] * len(ids)) == ["a", "", "", "", SMILE, "b", "", ""]


def test_a_long_text_costs_no_more_a_token_than_a_short_one() -> None:
    def cost(ids: list[int]) -> int:
        decoder = Bytes()
        text = StreamedText(decoder, ())
        for token in ids:
            text.add([token])
        return decoder.decoded

    for ids in (list(b"abc" * 400), list(SMILE.encode() * 300), [0x80] * 1200, [0xF0, 0x9F] * 600):
        assert cost(ids) < 3 * cost(ids[:600])


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab" + SMILE, max_size=24),
    st.lists(st.text("ab" + SMILE, min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
)
@example("aab", ["ab"], False)
@example("abaab", ["abb", "aab"], False)
def test_b73_no_part_of_a_stop_string_is_given_out(text: str, stops: list[str], include: bool) -> None:
    """Sample byte by byte, end where a stop string is complete, as an engine does."""
    decoder, ids, matched = Bytes(), list(text.encode()), ""
    for end in range(1, len(ids) + 1):
        found = [(decoder.text(ids[:end]).find(stop), -len(stop), stop) for stop in stops]
        found = [one for one in found if one[0] >= 0]
        if found:
            ids, matched = ids[:end], min(found)[2]
            break
    whole = cut_at_stop(decoder.text(ids), matched, include)
    stream = StreamedText(decoder, stops)
    # The last token comes with the completion, so only its text says what it adds.
    given = [stream.add([token]) for token in ids[:-1]]
    assert "".join([*given, stream.rest(whole)]) == whole
    for stop in stops:
        assert stop not in "".join(given)


# Real decoders


def model_dir(directory: Path, tokenizer: Tokenizer) -> ModelTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    return ModelTokenizer(directory)


def falling_back(directory: Path) -> ModelTokenizer:
    """As Llama's: words that begin with a mark for the space, and bytes for what has no word."""
    words = ["<unk>", "\u2581a", "b", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return model_dir(directory, tokenizer)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(0, 3).map(lambda i: [i]),
            st.just([260]),
            st.sampled_from(CHARACTERS).map(lambda c: [4 + byte for byte in c.encode()]),
            st.integers(0, 255).map(lambda b: [4 + b]),
        ),
        max_size=60,
    )
)
def test_bytes_that_are_decoded_as_a_run(
    tmp_path_factory: pytest.TempPathFactory, runs: list[list[int]]
) -> None:
    tokenizer = _cached("fallback", tmp_path_factory)
    ids = [token for run in runs for token in run]
    assert "".join(streamed(tokenizer, ids, [1] * len(ids))) == tokenizer.text(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=80))
def test_a_byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    tokenizer = _cached("bytes", tmp_path_factory)
    pieces = streamed(tokenizer, ids, [1] * len(ids))
    assert "".join(pieces) == tokenizer.text(ids)


def test_a_decoder_that_tidies_up_gives_its_text_at_the_end(tmp_path: Path) -> None:
    words = {"[UNK]": 0, "do": 1, "n't": 2, "##ne": 3}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tidying = model_dir(tmp_path, tokenizer)
    assert streamed(tidying, [1, 2], [1]) == ["", "", "don't"]


_tokenizers: dict[str, ModelTokenizer] = {}


def _cached(name: str, factory: pytest.TempPathFactory) -> ModelTokenizer:
    if name not in _tokenizers:
        directory = factory.mktemp(name)
        if name == "fallback":
            _tokenizers[name] = falling_back(directory)
        else:
            from opentinker_kit.testing.models import build_tiny_qwen3

            _tokenizers[name] = ModelTokenizer(build_tiny_qwen3(directory))
    return _tokenizers[name]
