"""`python -m opentinker.sandbox`: one JSON line that says what jails on this machine are made of.

Status 1, and the reason in place of the mode, where there can be none. It starts one to find out.
"""

import json
import sys

from opentinker.sandbox.jail import Jail


def main() -> int:
    """Try it and say so."""
    try:
        jail = Jail()
        result = jail.run("print('works')")
    except Exception as error:
        return _say({"mode": None, "error": str(error)}, 1)
    if result.stdout != "works\n":
        return _say({"mode": None, "error": f"a jail ended as {result.ended}: {result.stderr[-500:]}"}, 1)
    has = jail.capabilities
    return _say({"mode": str(has.mode), "bubblewrap": has.bubblewrap, "python": has.python}, 0)


def _say(facts: dict[str, str | None], status: int) -> int:
    sys.stdout.write(json.dumps(facts) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
