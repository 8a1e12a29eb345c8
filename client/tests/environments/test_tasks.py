"""Static data: where tasks come from, their order, and what is refused by the number of the row."""

import json
from pathlib import Path
from typing import Any

import pytest
from client.tests.doubles.cluster import World

import opentinker as ot
from opentinker import errors
from opentinker.environments.sources import LocalEnvironment

ROWS: list[dict[str, Any]] = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(7)]


def jsonl(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def saved(folder: Path, kind: str) -> Any:
    if kind == "jsonl":
        return jsonl(folder / "tasks.jsonl", *(json.dumps(row) for row in ROWS), "")
    if kind == "list":
        return ROWS
    if kind == "generator":
        return (row for row in ROWS)
    if kind == "indexable":

        class Lazy:
            """Only what indexing needs."""

            def __len__(self) -> int:
                return len(ROWS)

            def __getitem__(self, index: int) -> dict[str, Any]:
                return ROWS[index]

        return Lazy()
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "tasks.parquet")
        return str(folder / "tasks.parquet")
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    if kind == "data set":
        return made
    made.save_to_disk(str(folder / "saved"))
    return folder / "saved"


@pytest.mark.parametrize(
    "kind", ["jsonl", "list", "generator", "indexable", "parquet", "data set", "saved data set"]
)
def test_the_same_tasks_from_everywhere(kind: str, tmp_path: Path) -> None:
    tasks = ot.tasks(saved(tmp_path, kind))
    assert len(tasks) == 7
    assert list(tasks) == ROWS
    assert tasks[-1] == ROWS[-1]
    assert tasks[2:4] == ROWS[2:4]
    with pytest.raises(IndexError, match="no number 7"):
        _ = tasks[7]
    if kind != "saved data set":
        shorter = ot.tasks(saved(tmp_path, kind), make=lambda row: {"number": row["answer"]})
        assert list(shorter) == [{"number": i + 1} for i in range(7)]


def test_splits(tmp_path: Path) -> None:
    both = {"train": ROWS[:5], "test": ROWS[5:]}
    assert list(ot.tasks(both, split="test")) == ROWS[5:]  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="no split 'dev', only 'train', 'test'"):
        ot.tasks(both, split="dev")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="give one of its values"):
        ot.tasks(both)  # type: ignore[arg-type]
    datasets = pytest.importorskip("datasets")
    made = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in both.items()})
    made.save_to_disk(str(tmp_path / "saved"))
    for source in (made, tmp_path / "saved"):
        assert list(ot.tasks(source, split="test")) == ROWS[5:]
        with pytest.raises(errors.InvalidArgument, match="no split 'dev'"):
            ot.tasks(source, split="dev")
        with pytest.raises(errors.InvalidArgument, match="train"):
            ot.tasks(source)


@pytest.mark.parametrize(
    ("lines", "field", "message"),
    [
        (['{"a": 1}', "", '{"a": '], "tasks[1]", "line 3 of tasks.jsonl is no JSON"),
        (['{"a": 1}', "[1]"], "tasks[1]", "a task must be a dict, not list"),
        (['{"a": 1}', "null"], "tasks[1]", "a task must be a dict, not NoneType"),
        (['{"a": 1}', '{"a": NaN}'], "tasks[1]", "not representable as JSON"),
        (["[" * 100_000], "tasks[0]", "is no JSON"),
        ([""], "tasks", "has no rows"),
    ],
)
def test_what_is_wrong_is_said_with_the_number_of_the_row(
    tmp_path: Path, lines: list[str], field: str, message: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=message) as caught:
        ot.tasks(jsonl(tmp_path / "tasks.jsonl", *lines))
    assert caught.value.field == field


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    for source, message in (
        (tmp_path / "none.jsonl", "there is no file"),
        (tmp_path / "empty", "was not saved by"),
        (jsonl(tmp_path / "tasks.csv", "a,b"), "neither .jsonl nor .parquet"),
        (7, "not int"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            ot.tasks(source)  # type: ignore[arg-type]
    pytest.importorskip("pyarrow")
    with pytest.raises(errors.InvalidArgument, match=r"broken.parquet' cannot be read"):
        ot.tasks(tmp_path / "broken.parquet")


def test_a_row_that_cannot_be_made_a_task_is_named() -> None:
    with pytest.raises(errors.InvalidArgument, match="KeyError: 'b'") as caught:
        ot.tasks([{"b": 1}, {"a": 1}], make=lambda row: {"b": row["b"]}, name="train")
    assert caught.value.field == "train[1]"


async def test_single_turn_reads_files(tmp_path: Path) -> None:
    path = saved(tmp_path, "jsonl")
    env = ot.single_turn(
        {"train": path, "test": ROWS[:2]}, reward=lambda answer, task: float(answer == str(task["answer"]))
    )
    source = LocalEnvironment(env)
    train = await source.tasks("train")
    assert train is not None
    assert list(train) == ROWS
    assert await source.tasks("test") == ROWS[:2]
    alone = LocalEnvironment(ot.single_turn(str(path), reward=lambda answer, task: 1.0))
    assert alone.info.splits == ("train",)


def test_a_run_names_the_row_that_is_wrong(doubles: World, tmp_path: Path) -> None:
    env = ot.single_turn([{"prompt": "?"}, ["no task"]], reward=lambda answer, task: 1.0)  # type: ignore[list-item]
    with pytest.raises(errors.InvalidArgument, match="a task must be a dict, not list") as caught:
        ot.fit(env, "tiny", steps=2, groups_per_step=2, run_dir=tmp_path)
    assert caught.value.field == "tasks[1]"


def test_the_order_of_an_epoch_depends_on_the_seed_only(doubles: World) -> None:
    policy = doubles.cluster.create_policy("tiny").result()
    env = ot.single_turn(ROWS, reward=lambda answer, task: 1.0)

    def order(seed: int, start: int = 0) -> list[int]:
        batches = ot.rollouts(policy, env, groups=1, group_size=1, seed=seed, start=start)
        doubles.portal.run(batches.size())
        return [batches.task(ordinal)["answer"] for ordinal in range(start, 21)]

    first = order(1)
    assert order(1) == first != order(2)
    assert order(1, start=9) == first[9:]  # also in the middle of an epoch
    for epoch in range(3):
        assert sorted(first[7 * epoch : 7 * epoch + 7]) == list(range(1, 8))
    assert first[:7] != first[7:14]
