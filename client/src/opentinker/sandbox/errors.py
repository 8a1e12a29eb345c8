"""What goes wrong with a jail itself, never with the code in it (that is a `Result`)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentinkerapi.runtime.errors import OpenTinkerError


class InterpreterEnded(RuntimeError):
    """The interpreter has ended, and its variables with it; start another."""


def unavailable(text: str) -> "OpenTinkerError":
    """The error for a machine on which there can be no jail. Nothing ever runs outside one instead."""
    # Here and not above: defining an environment imports no grpc.
    from opentinkerapi.runtime.errors import MissingDependency
    from opentinkerapi.runtime.reasons import Reason

    return MissingDependency(text, reason=Reason.MISSING_DEPENDENCY)
