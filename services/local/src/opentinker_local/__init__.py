"""The embedded stack: every service on one machine, under one supervisor. `README.md` has its protocol."""

from opentinker_local.control import attach, start_stack, stop_stack
from opentinker_local.state import AlreadyRunning, NotRunning, StackError, StackInfo

__all__ = [
    "AlreadyRunning",
    "NotRunning",
    "StackError",
    "StackInfo",
    "attach",
    "start_stack",
    "stop_stack",
]
