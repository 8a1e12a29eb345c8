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
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size, e.g. 0.1")
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
    parameters = inspect.signature(run).parameters
    takes_options = "options" in parameters
    if not takes_options and options != Options(started=options.started):
        print(f"{arguments.name!r} takes none of --case, --pairs, --budget-s", file=sys.stderr)
        return 2
    if arguments.scale != 1.0 and "scale" not in parameters:
        print(f"{arguments.name!r} has one size: it takes no --scale", file=sys.stderr)
        return 2
    sizes = {"scale": arguments.scale} if "scale" in parameters else {}
    results: Iterable[Result] = run(options, **sizes) if takes_options else run()
    try:
        for result in results:
            print(result.line(), flush=True)
    except Unfinished as rest:
        print(rest, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
