"""Tasks from data: files, data sets, anything that can be indexed, as the JSON objects that `reset` gets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from opentinker.environments.content import plain_json
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.rows import Source, raw_rows
from opentinker.errors import invalid


class Tasks(Sequence[dict[str, Any]]):
    """Rows of a data set, each checked and made plain when it is asked for: what is indexed is not copied.

    The order is the data's. A row that is no JSON object is an InvalidArgument that names it.
    """

    def __init__(
        self, rows: Any, name: str, make: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    ) -> None:
        self._rows = rows
        self._name = name
        self._make = make

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"{self._name} has {len(self)} tasks, no number {index}")
        row = self._rows[place]
        try:
            return plain_json(row if self._make is None else self._make(plain_json(row, "a row")), "a task")
        except InvalidEpisodeData as error:
            raise invalid(f"{self._name}[{place}]", str(error)) from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"it cannot be made a task: {type(error).__name__}: {error}"
            raise invalid(f"{self._name}[{place}]", text) from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        return f"<Tasks {self._name} of {len(self)} rows>"


def tasks(
    source: Source,
    *,
    split: str = "",
    make: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    name: str = "tasks",
) -> Tasks:
    """Tasks from a .jsonl or .parquet file, a directory that `datasets` saved, a Hugging Face data set, or
    any sequence or iterable of JSON objects.

    `split` names one of a saved or loaded dictionary of data sets; `make` turns a row into a task. What
    can be indexed stays where it is and is read row by row; what cannot is read once. InvalidArgument
    names the row (`tasks[17]`) that is no JSON object, the file or the split that is not there, and a data
    set without rows.
    """
    rows = raw_rows(source, name, split)
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        rows = list(rows)
    made = Tasks(rows, name, make)
    if not len(made):
        raise invalid(name, "the data set has no rows")
    if isinstance(rows, list):
        for place in range(len(rows)):
            _ = made[place]
    return made
