"""Tool calls in text, however the text is cut."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_gateway.domain.messages import Call
from opentinker_gateway.domain.tools import (
    CLOSE,
    OPEN,
    BareCalls,
    Piece,
    PlainText,
    Splitter,
    TaggedCalls,
    ToolFormat,
    read_calls,
    splitter,
)

NAMES = {"add", "look up"}
PARTS = st.sampled_from(
    [
        "text",
        " ",
        "\n",
        "<",
        "<tool",
        OPEN,
        CLOSE,
        '{"name": "add", "arguments": {"a": 1}}',
        '[{"name": "look up"}]',
        "{",
        "ß🙂",
    ]
)


def split(made: Splitter, text: str, cuts: list[int]) -> list[Piece]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces: list[Piece] = []
    start = 0
    for end in ends:
        pieces += made.feed(text[start:end])
        start = end
    return pieces + made.finish()


def joined(pieces: list[Piece]) -> list[Piece]:
    """Texts that follow each other as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and isinstance(piece, str) and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


@settings(deadline=None)
@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(0, 120), max_size=8))
def test_where_the_text_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    for kind in (TaggedCalls, BareCalls):
        whole = joined(split(kind(NAMES), text, []))
        assert joined(split(kind(NAMES), text, cuts)) == whole
        calls = [piece for piece in whole if isinstance(piece, Call)]
        if not calls:
            # Nothing that was said is lost.
            assert "".join(piece for piece in whole if isinstance(piece, str)) == text
    assert joined(split(PlainText(), text, cuts)) == ([text] if text else [])


def test_calls_among_text() -> None:
    one, two = json.dumps({"name": "add", "arguments": {"a": 1}}), json.dumps({"name": "look up"})
    text = f"Let me see.\n{OPEN}\n{one}\n{CLOSE}\n{OPEN}{two}{CLOSE}\n"
    assert split(splitter(ToolFormat.TAGGED, NAMES), text, [3, 20, 30]) == [
        "Let",
        " me see.",
        Call("add", '{"a": 1}'),
        Call("look up", "{}"),
    ]


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    made = TaggedCalls(NAMES)
    assert made.feed("Hello") == ["Hello"]
    assert made.feed(" <to") == []
    assert made.feed("day") == [" <today"]


def test_a_call_whose_end_is_missing_is_one_where_it_is_whole() -> None:
    body = '{"name": "add", "arguments": "{\\"a\\": 1}"}'
    assert split(TaggedCalls(NAMES), f"{OPEN}{body}", []) == [Call("add", '{"a": 1}')]
    assert split(TaggedCalls(NAMES), f" {OPEN}{body[:-1]}", []) == [f" {OPEN}{body[:-1]}"]


def test_other_ways_to_write_a_call() -> None:
    assert read_calls('{"name": "add", "parameters": {"a": 1}}', NAMES) == [Call("add", '{"a": 1}')]
    assert read_calls('{"type": "function", "function": {"name": "add"}}', NAMES) == [Call("add", "{}")]
    for none in (
        "",
        "5",
        "null",
        "[]",
        '{"name": 5}',
        '{"name": "rm"}',
        "[" * 100_000,
        '[{"name": "add"}, 5]',
    ):
        assert read_calls(none, NAMES) is None
