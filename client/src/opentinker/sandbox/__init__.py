"""Running code that nobody trusts: a jail, an interpreter in one, graders, and the tool for agents.

    jail = Jail(Limits(wall_s=5))
    print(jail.run("print(6 * 7)").stdout)

This is part of the client library, because that is what is installed wherever environments run: in a user's
own process, and in the virtual environments of env_host's workers, which env_host starts and never imports.
It needs the standard library only, and imports no service, no grpc and no numpy. Services learn what there is
as they start workers, by a program: `python -m opentinker.sandbox`.

There is one way to run untrusted code, bubblewrap. Where that is missing a typed error says what to install;
nothing falls back on a plain process.
"""

from opentinker.sandbox.command import Mode
from opentinker.sandbox.errors import InterpreterEnded
from opentinker.sandbox.grader import Grade, Grader, output_tests
from opentinker.sandbox.jail import Capabilities, Interpreter, Jail
from opentinker.sandbox.limits import Ended, Limits, Result
from opentinker.sandbox.tool import CodeInterpreter

__all__ = [
    "Capabilities",
    "CodeInterpreter",
    "Ended",
    "Grade",
    "Grader",
    "Interpreter",
    "InterpreterEnded",
    "Jail",
    "Limits",
    "Mode",
    "Result",
    "output_tests",
]
