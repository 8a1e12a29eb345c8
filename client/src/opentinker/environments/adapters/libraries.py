"""What all adapters of libraries need: the library or a clear error, and JSON of what it says."""

import importlib
import math
from collections.abc import Mapping
from typing import Any

from opentinker.environments.errors import EnvironmentDefinitionError


def library(module: str, extra: str) -> Any:
    """The library's module. MissingDependency naming the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        # Only here: an environment that can be played needs no error of the client.
        from opentinker.errors import MissingDependency, Reason

        raise MissingDependency(
            f"{module} cannot be imported ({error}); install it with:  pip install 'opentinker[{extra}]'",
            reason=Reason.MISSING_DEPENDENCY,
        ) from error


def named_class(given: Any, where: str) -> Any:
    """A class or function, or what "module:name" names. EnvironmentDefinitionError."""
    if not isinstance(given, str):
        return given
    module, _, name = given.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentDefinitionError(
            f"{where}: {given!r} names nothing as module:name: {error}"
        ) from None


def plain(value: Any) -> Any:
    """A JSON value that says the same, for logs: what JSON has no way to say is said as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    return str(value)


def is_rebuilt(env: Any) -> bool:
    """Whether a copy of an environment of Gymnasium or PettingZoo is a new one: EzPickle, a class of
    theirs, makes it from the arguments of the constructor and leaves the state behind.
    """
    while env is not None:
        if any(cls.__name__ == "EzPickle" for cls in type(env).__mro__):
            return True
        env = next((vars(env)[name] for name in ("env", "aec_env", "par_env") if name in vars(env)), None)
    return False
