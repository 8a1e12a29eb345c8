"""`dataclass` of the standard library, but a class's methods are written when they are first needed.

The standard decorator writes and compiles six methods for each frozen class with slots, which takes a
fraction of a millisecond; for the hundred value classes of this package that was half of its import time.
Here a class gets its fields and slots at once, and its `__init__`, `__repr__`, `__eq__` and `__hash__`, taken
from a standard dataclass with the same fields, at the first use of one of them. What they do is the same.

For `@dataclass(frozen=True, slots=True)` on a class that inherits from no dataclass; any other use is the
standard decorator's.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """See the module."""
        if cls is None and options == {"frozen": True, "slots": True}:
            return _record
        decorator = dataclasses.dataclass(**options)
        return decorator if cls is None else decorator(cls)


_WRITTEN_LATER = ("__init__", "__repr__", "__eq__", "__hash__")


def _record(cls: type) -> Any:
    """The class with fields and slots, frozen, and with stand-ins for the methods that it does not define."""
    if dataclasses.is_dataclass(cls):
        return dataclasses.dataclass(frozen=True, slots=True)(cls)
    own = vars(cls)
    later = [name for name in _WRITTEN_LATER if own.get(name) is None]
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    made.__dataclass_params__.frozen = True  # as for its subclasses it is
    for name in later:
        setattr(made, name, _stand_in(made, name, later))
    if "__init__" in later:
        made.__signature__ = _Signature(made, later)
    made.__setattr__, made.__delattr__ = _refuse_to_set, _refuse_to_delete
    made.__getstate__, made.__setstate__ = _state, _set_state
    return made


def _stand_in(made: Any, name: str, later: list[str]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _write(made, later)
        return getattr(made, name)(self, *args, **kwargs)

    method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
    return method


def _write(made: Any, names: list[str]) -> None:
    """Replace the stand-ins by the methods of a standard dataclass of the same fields."""
    wanted = [
        (
            each.name,
            each.type,
            dataclasses.field(
                default=each.default,
                default_factory=each.default_factory,
                init=each.init,
                repr=each.repr,
                hash=each.hash,
                compare=each.compare,
            ),
        )
        for each in dataclasses.fields(made)
    ]
    shared = {"__post_init__": made.__post_init__} if hasattr(made, "__post_init__") else {}
    twin = dataclasses.make_dataclass(made.__name__, wanted, frozen=True, namespace=shared)
    for name in names:
        method = getattr(twin, name)
        method.__qualname__, method.__module__ = f"{made.__qualname__}.{name}", made.__module__
        setattr(made, name, method)
    if "__signature__" in vars(made):
        del made.__signature__


class _Signature:
    """The signature of a class whose `__init__` is not written yet, for whoever inspects it."""

    def __init__(self, made: Any, names: list[str]) -> None:
        self._made = made
        self._names = names

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        _write(self._made, self._names)
        return inspect.signature(owner)


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_frozen(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_frozen(self: Any, name: str) -> bool:
    """All of an instance, but for what a subclass that is no dataclass has beside the fields."""
    return not hasattr(self, "__dict__") or name in self.__dataclass_fields__


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)
