"""Rows of data sets: where they come from, what is refused and how, what becomes of long ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.tokenizers import CHATML, STRIPS_THINKING, files
from tokenizers import Tokenizer

from opentinker.errors import InvalidArgument, MissingDependency, TemplateProblem
from opentinker.supervised.data import Chat, Completion, read
from opentinker.supervised.encoding import Encoding, Examples, encode
from opentinker.supervised.rows import supervised_samples
from opentinkerapi.runtime.render import ChatTokenizer

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "4"}
CHAT = {"messages": [USER, FOUR]}
PAIR = {"prompt": "2 + 2 =", "completion": " 4"}


def encoded(rows: list[Any], max_tokens: int = 200, **options: Any) -> Examples:
    tokens = ChatTokenizer(files(options.pop("template", CHATML)))
    return encode(read(rows, "data"), tokens, Encoding(max_tokens, **options))


def test_both_kinds_of_rows_from_anything_iterable() -> None:
    chat, pair = read(iter([CHAT, PAIR]), "data")
    assert chat == Chat([USER, FOUR], None, [0.0, None])
    assert pair == Completion("2 + 2 =", " 4")
    (turns,) = read([{"prompt": [USER, FOUR, USER], "completion": [FOUR]}], "data")
    assert isinstance(turns, Chat)
    # What the prompt says is context, whoever said it.
    assert turns.factors("all") == [0.0, 0.0, 0.0, 1.0]


def test_weights_of_messages_and_rows() -> None:
    messages = [USER, {**FOUR, "train": False}, USER, {**FOUR, "weight": -2}, USER, FOUR]
    (row,) = read([{"messages": messages, "weight": 0.5}], "data")
    assert isinstance(row, Chat)
    assert row.factors("all") == [0, 0, 0, -1.0, 0, 0.5]
    (plain,) = read([{"messages": [USER, FOUR, USER, FOUR]}], "data")
    assert isinstance(plain, Chat)
    assert plain.factors("last") == [0, 0, 0, 1.0]


def test_content_in_parts_tool_calls_and_what_columnar_files_fill_with_none() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "weight": None, "name": None},
            {"role": "tool", "content": "2", "tool_call_id": "x"},
            {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        ],
        "tools": '[{"name": "add"}]',
        "prompt": None,
    }
    (chat,) = read([row], "data")
    assert isinstance(chat, Chat)
    assert chat.messages[0]["content"] == "1+1"
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert chat.messages[3]["reasoning_content"] == "one and one"
    assert chat.tools == [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "field", "says"),
    [
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            "'robot' is none of system, user",
        ),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1].content", "is empty"),
        ({"messages": [USER, {**FOUR, "mood": "good"}]}, "messages[1]", "unknown keys ['mood']"),
        ({"messages": [USER, {**FOUR, "weight": float("nan")}]}, "messages[1].weight", "finite number"),
        ({"messages": [USER, {**FOUR, "train": 1}]}, "messages[1].train", "true or false"),
        ({"messages": [USER, {**FOUR, "train": True, "weight": 1}]}, "messages[1]", "both train and weight"),
        ({"messages": [{**USER, "weight": 1}, FOUR]}, "messages[0]", "does not produce it"),
        ({"messages": [USER, {**FOUR, "tool_calls": [{"x": 1}]}]}, "messages[1]", "malformed"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, FOUR]},
            "messages[0].content[0]",
            "text",
        ),
        ({"messages": [{"role": "user", "content": 7}, FOUR]}, "messages[0].content", "must be a text"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hello"}, "messages", "a list of messages"),
        ({"messages": [USER]}, "", "nothing of it can be trained on"),
        ({"messages": [USER, {**FOUR, "weight": 0}]}, "", "nothing of it can be trained on"),
        ({**CHAT, **PAIR}, "", "a row has messages, or prompt and completion"),
        ({"prompt": "a"}, "", "a row has messages, or prompt and completion"),
        ({"prompt": "a", "completion": [FOUR]}, "", "two texts or two lists"),
        ({"prompt": "", "completion": "b"}, "prompt", "is empty"),
        ({"prompt": "a", "completion": ""}, "completion", "is empty"),
        ({**PAIR, "tools": []}, "tools", "only conversations"),
        ({**CHAT, "source": "web"}, "", "unknown columns ['source']"),
        ({**CHAT, "tools": "{"}, "tools", "is no JSON"),
        ({**CHAT, "weight": "2"}, "weight", "finite number"),
        (["messages"], "", "must be a mapping"),
    ],
)
def test_bad_rows_are_refused_by_row_and_field(row: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read([CHAT, row], "data")
    assert refused.value.field == f"data[1].{field}".removesuffix(".")
    assert says in refused.value.message


def test_columns_that_mean_nothing_here_are_named_by_the_caller() -> None:
    assert read([{**CHAT, "source": "web"}], "data", ["source"]) == read([CHAT], "data")


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "chats.jsonl"
    lines.write_text(json.dumps(CHAT) + "\n\n" + json.dumps(PAIR) + "\n")
    assert read(lines, "data") == read(str(lines), "data") == read([CHAT, PAIR], "data")
    lines.write_text(json.dumps(CHAT) + "\n{torn")
    for path, field, says in (
        (lines, "data[1]", "line 2 of chats.jsonl is no JSON"),
        (tmp_path / "nothing.jsonl", "data", "there is no file"),
        (tmp_path / "rows.csv", "data", "neither .jsonl nor .parquet"),
        (tmp_path, "data", "was not saved by"),
    ):
        (tmp_path / "rows.csv").touch()
        with pytest.raises(InvalidArgument, match=says.replace(".", "[.]")) as refused:
            read(path, "data")
        assert refused.value.field == field
    for empty, says in (
        ([], "has no rows"),
        ({"train": [CHAT], "test": []}, "'train', 'test'"),
        (7, "iterable"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            read(empty, "data")  # type: ignore[arg-type]


def test_parquet_and_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [CHAT, {"messages": [USER, {**FOUR, "weight": 2.0}]}]
    held = datasets.Dataset.from_list(rows)
    assert read(held, "data") == read(rows, "data")
    held.to_parquet(str(tmp_path / "rows.parquet"))
    assert read(tmp_path / "rows.parquet", "data") == read(rows, "data")
    held.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved", "data") == read(rows, "data")
    splits = datasets.DatasetDict({"train": held, "test": held})
    splits.save_to_disk(str(tmp_path / "splits"))
    assert read(tmp_path / "splits" / "test", "data") == read(rows, "data")
    for several in (tmp_path / "splits", splits):
        with pytest.raises(InvalidArgument, match=r"train.*test"):
            read(several, "data")


@pytest.mark.parametrize("module", ["datasets", "pyarrow"])
def test_a_missing_library_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    path = tmp_path / "rows.parquet"
    if module == "datasets":
        path = tmp_path / "saved"
        path.mkdir()
        (path / "state.json").touch()
    else:
        path.touch()
    with pytest.raises(MissingDependency, match=rf"needs {module}.*opentinker\[datasets\]"):
        read(path, "data")


def test_b70_long_rows_are_refused_by_number_or_dropped_and_counted_never_cut() -> None:
    long = {"messages": [USER, {"role": "assistant", "content": "4" * 150}]}
    with pytest.raises(InvalidArgument, match=r"data\[1\]: has \d+ tokens and max_tokens is 100"):
        encoded([CHAT, long, CHAT], 100)
    kept = encoded([CHAT, long, CHAT], 100, too_long="drop")
    assert kept.dropped == 1
    assert [item.name for item in kept.items] == ["data[0]", "data[2]"]
    assert kept.metrics("data")["data/dropped_too_long"] == 1.0
    assert kept.metrics("data")["data/rows"] == 3.0
    assert kept.longest == len(kept.items[0].token_ids)
    # Exactly as long as allowed is not too long.
    assert len(encoded([CHAT], kept.longest)) == 1
    with pytest.raises(InvalidArgument, match="every row has more"):
        encoded([long], 100, too_long="drop")


def test_b70_a_tokenizer_that_wants_to_cut_and_pad_does_neither() -> None:
    made = files()
    cutting = Tokenizer.from_str(made["tokenizer.json"].decode())
    cutting.enable_truncation(8, direction="left")
    cutting.enable_padding(length=400, direction="left")
    theirs = ChatTokenizer({**made, "tokenizer.json": cutting.to_str().encode()})
    rows, how = read([CHAT, PAIR], "data"), Encoding(200)
    assert encode(rows, theirs, how).digest == encode(rows, ChatTokenizer(made), how).digest


def test_errors_of_templates_name_the_row() -> None:
    turns = [USER, {"role": "assistant", "content": "<think>x</think>4"}, USER, FOUR]
    with pytest.raises(TemplateProblem, match=r"^data\[1\]: the chat template writes"):
        encoded([CHAT, {"messages": turns}], template=STRIPS_THINKING)
    split = encoded([CHAT, {"messages": turns}], template=STRIPS_THINKING, rewritten_history="split")
    assert [item.name for item in split.items] == ["data[0]", "data[1]/0", "data[1]/1"]
    assert split.split == 1
    with pytest.raises(InvalidArgument, match=r"^data\[0\]: .*refused the messages: no"):
        encoded([CHAT], template="{{ raise_exception('no') }}")
    first = {"messages": [FOUR]}
    bare = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    with pytest.raises(InvalidArgument, match=r"data\[0\]: its first token would be trained on"):
        encoded([first], template=bare)


def test_examples_become_samples_with_exact_masks() -> None:
    tokens = ChatTokenizer(files())
    made = supervised_samples([CHAT, {**CHAT, "weight": -1}], tokens, max_tokens=100)
    plain, weighted = made
    assert plain.weights is None
    assert weighted.weights is not None
    assert list(weighted.weights) == [-1.0 * flag for flag in plain.loss_mask]
    assert [
        tokens.decode([i], skip_special_tokens=False)
        for i, m in zip(plain.token_ids, plain.loss_mask, strict=True)
        if m
    ] == ["4", "<|im_end|>"]
    assert made.loss_tokens == 4
    assert made.metrics["data/loss_tokens"] == 4.0
    assert plain.sample_id == "data[0]"


@pytest.mark.parametrize("option", ["train_on", "rewritten_history", "too_long"])
def test_unknown_words_are_refused(option: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{option}: must be one of"):
        Encoding(100, **{option: "truncate"})  # type: ignore[arg-type]
