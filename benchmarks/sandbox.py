"""What running untrusted code in a jail costs. The program is `print(6 * 7)`.

`one_shot`: jails a second, each begun and gone, with two threads for each core; beside it the same program in
plain processes of the same interpreter, interleaved, and milliseconds of CPU time of one run of each. `exec`:
milliseconds of one exec of an interpreter that stays, on one thread; beside it how long one takes to start.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from benchmarks.pairs import Options
from benchmarks.results import Result, interval_of_median
from opentinker.sandbox import Jail

CODE, PRINTED = "print(6 * 7)", "42\n"
RUNS = 200
EXECS = 2000
CASES = ("one_shot", "exec")


def run(options: Options) -> Iterable[Result]:
    unknown = options.cases - set(CASES)
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    jail = Jail()
    if options.wants("one_shot"):
        yield _one_shot(jail, options.pairs)
    if options.wants("exec"):
        yield _exec(jail, options.pairs)


def _one_shot(jail: Jail, pairs: int) -> Result:
    words = [jail.capabilities.python, "-P", "-s", "-S", "-c", CODE]

    def jailed() -> str:
        return jail.run(CODE).stdout

    def plain() -> str:
        return subprocess.run(words, stdout=subprocess.PIPE, env={}, text=True).stdout

    ours: list[float] = []
    theirs: list[float] = []
    costs: list[float] = []
    plain_costs: list[float] = []
    _rate(jailed)
    _rate(plain)
    for _ in range(pairs):
        for measure, rates, cpu in ((jailed, ours, costs), (plain, theirs, plain_costs)):
            rate, cost = _rate(measure)
            rates.append(round(rate, 2))
            cpu.append(round(cost, 2))
        print(f"sandbox/one_shot: {ours[-1]:.0f}/s, plain {theirs[-1]:.0f}/s", file=sys.stderr)
    middle, low, high = interval_of_median(ours)
    raw: dict[str, object] = {"mode": str(jail.capabilities.mode), "cores": os.cpu_count()}
    raw |= {"jails_per_s": ours, "plain_per_s": theirs, "jail_cpu_ms": costs, "plain_cpu_ms": plain_costs}
    return Result("sandbox", "one_shot", middle, "higher", low, high, pairs, "none: runs per second", raw)


def _rate(program: Callable[[], str]) -> tuple[float, float]:
    """Runs a second with all cores, and milliseconds of CPU time of each."""
    # A third of a run is waiting, mostly for the kernel to make and clear away namespaces.
    threads = 2 * (os.cpu_count() or 1)
    before, began = _cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        printed = list(pool.map(lambda _: program(), range(RUNS)))
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - before
    if printed != [PRINTED] * RUNS:
        raise SystemExit(f"a run printed something else: {set(printed)}")
    return RUNS / seconds, 1000 * cpu_s / RUNS


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _exec(jail: Jail, pairs: int) -> Result:
    times, starts = [], []
    for _ in range(pairs):
        began = time.perf_counter()
        with jail.interpreter() as python:
            python.exec("pass")
            starts.append(round(1000 * (time.perf_counter() - began), 3))
            each = []
            for _ in range(EXECS):
                began = time.perf_counter()
                python.exec(CODE)
                each.append(1000 * (time.perf_counter() - began))
        times.append(round(statistics.median(each), 4))
    middle, low, high = interval_of_median(times)
    raw = {"exec_ms": times, "start_ms": starts}
    return Result("sandbox", "exec", middle, "lower", low, high, pairs, "none: ms per exec", raw)
