"""`python -m opentinker_local run --state-dir DIRECTORY [--owner-fd N] [--options FILE.json]`, and `stop`.

Exit status: 0 stopped in order, 1 could not start, 3 another supervisor holds the directory.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentinker_local.control import load_options, stop_stack
from opentinker_local.parts import MODULES, Options
from opentinker_local.state import AlreadyRunning, StackError, StateDir
from opentinker_local.supervisor import Supervisor

ALREADY_RUNNING = 3


def main(argv: Sequence[str] | None = None, modules: Mapping[str, str] = MODULES) -> int:
    """Run a command; `modules` say what runs as which part."""
    parser = argparse.ArgumentParser(prog="python -m opentinker_local", description="The embedded stack.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="be the supervisor of a stack, until told to stop")
    run.add_argument("--state-dir", type=Path, required=True)
    run.add_argument(
        "--owner-fd", type=int, help="read end of the owner's pipe; the stack ends when it closes"
    )
    run.add_argument("--options", type=Path, help="JSON: settings by part, over the stack's own")
    stop = commands.add_parser("stop", help="stop the stack in a directory")
    stop.add_argument("--state-dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if sys.platform != "linux":
        sys.stderr.write("the embedded stack needs Linux; give connect() the address of a cluster\n")
        return 1
    state = StateDir(arguments.state_dir.resolve())
    try:
        if arguments.command == "stop":
            stop_stack(state.root)
            return 0
        owned = arguments.owner_fd is not None
        with state.hold(owned=owned):
            options = Options(modules=modules, settings=load_options(arguments.options))
            Supervisor(state, options, arguments.owner_fd).run()
    except AlreadyRunning as error:
        sys.stderr.write(f"{error}\n")
        return ALREADY_RUNNING
    except (StackError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
