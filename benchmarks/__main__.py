"""Run one benchmark by name, or list them."""

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

import benchmarks
from benchmarks.pairs import DEFAULT_BUDGET_S, DEFAULT_PAIRS, Options, Unfinished
from benchmarks.results import Result


def names() -> list[str]:
    """Modules of this package that define `run`."""
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]
    return sorted(name for name in found if name != "__main__" and hasattr(load(name), "run"))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--case", action="append", default=[], help="only this case; may be repeated")
    parser.add_argument("--pairs", type=int, default=DEFAULT_PAIRS, help="interleaved pairs a case")
    parser.add_argument(
        "--budget-s", type=float, default=DEFAULT_BUDGET_S, help="begin no further pair after so many seconds"
    )
    arguments = parser.parse_args(argv)
    known = names()
    if arguments.list:
        print(*known, sep="\n")
        return 0
    if arguments.name not in known:
        print(f"unknown benchmark {arguments.name!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    run = load(arguments.name).run
    options = Options(arguments.pairs, frozenset(arguments.case), arguments.budget_s)
    takes_options = "options" in inspect.signature(run).parameters
    if not takes_options and options != Options(started=options.started):
        print(f"{arguments.name!r} takes none of --case, --pairs, --budget-s", file=sys.stderr)
        return 2
    results: Iterable[Result] = run(options) if takes_options else run()
    try:
        for result in results:
            print(result.line(), flush=True)
    except Unfinished as rest:
        print(rest, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
