"""Rows of data sets on disk or in memory, before anybody looks at what they say."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from opentinker.errors import MissingDependency, Reason, invalid

Source = str | Path | Iterable[Any]
"""A file or directory on disk, or rows: a list, a generator, a Hugging Face data set."""


def raw_rows(data: Source, name: str, split: str = "") -> Iterable[Any]:
    """The rows of a .jsonl or .parquet file, of a directory that `datasets` saved, or of what holds rows.
    `name` is the argument it came by, for errors; `split` names one of several.

    InvalidArgument naming the row, or the file that is not there; MissingDependency for formats whose
    library is not installed.
    """
    if isinstance(data, str | Path):
        return _from_disk(Path(data), name, split)
    if isinstance(data, Mapping):
        return _split(data, name, split)
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        raise invalid(name, f"must be a path or an iterable of rows, not {type(data).__name__}")
    return data


def _split(splits: Mapping[Any, Any], name: str, split: str) -> Iterable[Any]:
    known = ", ".join(repr(str(key)) for key in splits)
    if not split:
        raise invalid(name, f"it is a mapping with {known}; give one of its values, a data set of rows")
    if split not in splits:
        raise invalid(name, f"it has no split {split!r}, only {known}")
    rows: Iterable[Any] = splits[split]
    return rows


def _from_disk(path: Path, name: str, split: str) -> Iterable[Any]:
    if path.is_dir():
        return _hugging_face(path, name, split)
    if not path.is_file():
        raise invalid(
            name,
            f"there is no file or directory {str(path)!r}; a data set of a hub is loaded with "
            f"datasets.load_dataset(...), whose result can be given here",
        )
    if path.suffix == ".jsonl":
        return _jsonl(path, name)
    if path.suffix == ".parquet":
        return _parquet(path, name)
    raise invalid(name, f"{path.name!r} is neither .jsonl nor .parquet, nor a directory of a saved data set")


def _jsonl(path: Path, name: str) -> Iterator[Any]:
    index = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise invalid(
                    f"{name}[{index}]", f"line {number} of {path.name} is no JSON: {error}"
                ) from None
            index += 1


def _parquet(path: Path, name: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise _missing("pyarrow", f"reading {path.name}") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise invalid(name, f"{path.name!r} cannot be read: {error}") from error


def _hugging_face(path: Path, name: str, split: str) -> Iterable[Any]:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        if not split:
            raise invalid(name, f"{str(path)!r} holds the splits {splits}; give the directory of one of them")
        if split not in splits:
            raise invalid(name, f"{str(path)!r} has no split {split!r}, only {splits}")
        path = path / split
    if not (path / "state.json").is_file():
        raise invalid(name, f"{str(path)!r} was not saved by datasets.Dataset.save_to_disk()")
    try:
        import datasets
    except ImportError:
        raise _missing("datasets", f"reading {str(path)!r}") from None
    rows: Iterable[Any] = datasets.load_from_disk(str(path))
    return rows


def _missing(package: str, purpose: str) -> MissingDependency:
    return MissingDependency(
        f"{purpose} needs {package}, which is not installed; install it with:  "
        f"pip install 'opentinker[datasets]'",
        reason=Reason.MISSING_DEPENDENCY,
    )
