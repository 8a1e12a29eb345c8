"""Rows that have not ended, in memory beside their tables.

The scheduler looks at all of them many times a second and changes few. One leader writes the database, and
one thread of it, so what it wrote is what there is. Writes go to the table and here; a transaction that is
rolled back is undone here as well.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class LiveRows(Generic[T]):
    """By id, and by what `groups` say of a row, as the transaction that runs now sees them."""

    def __init__(
        self, key: Callable[[T], str], alive: Callable[[T], bool], **groups: Callable[[T], str]
    ) -> None:
        self._key = key
        self._alive = alive
        self._group_of = groups
        self._rows: dict[str, T] = {}
        self._groups: dict[str, dict[str, dict[str, T]]] = {name: {} for name in groups}
        self._before: dict[str, T | None] = {}
        """What this transaction changed, as it was."""

    def load(self, rows: Iterable[T]) -> None:
        """Begin with what the table has."""
        for row in rows:
            self._set(self._key(row), row)

    def find(self, key: str) -> T | None:
        return self._rows.get(key)

    def all(self) -> list[T]:
        return list(self._rows.values())

    def group(self, name: str, value: str) -> list[T]:
        """The rows of which the group `name` says `value`."""
        return list(self._groups[name].get(value, {}).values())

    def count(self, name: str, value: str) -> int:
        return len(self._groups[name].get(value, ()))

    def put(self, row: T) -> None:
        """A row was written."""
        key = self._key(row)
        self._before.setdefault(key, self._rows.get(key))
        self._set(key, row if self._alive(row) else None)

    def commit(self) -> None:
        self._before.clear()

    def roll_back(self) -> None:
        for key, row in self._before.items():
            self._set(key, row)
        self._before.clear()

    def _set(self, key: str, row: T | None) -> None:
        old = self._rows.get(key)
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = row
        for name, group_of in self._group_of.items():
            groups = self._groups[name]
            new_group = None if row is None else group_of(row)
            if old is not None and (old_group := group_of(old)) != new_group:
                groups[old_group].pop(key, None)
                if not groups[old_group]:
                    del groups[old_group]
            if row is not None and new_group is not None:
                groups.setdefault(new_group, {})[key] = row
