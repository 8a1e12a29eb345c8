"""Run one benchmark by name, or list them."""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

import benchmarks
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
    arguments = parser.parse_args(argv)
    known = names()
    if arguments.list:
        print(*known, sep="\n")
        return 0
    if arguments.name not in known:
        print(f"unknown benchmark {arguments.name!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    results: Iterable[Result] = load(arguments.name).run()
    for result in results:
        print(result.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
