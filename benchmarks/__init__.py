"""Benchmarks: `python -m benchmarks NAME` prints one JSON line for each case, and nothing else on stdout.

A benchmark is a module of this package with a function `run() -> Iterable[Result]`; its name is the module's.
Numbers are compared, never asserted here: the bounds stand in docs/benchmarks.md.
"""
