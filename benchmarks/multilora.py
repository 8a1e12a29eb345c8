"""Eight LoRA policies on one trainer server against eight processes, one for each. SmolLM2-135M, rank 16.

Every process runs a plain loop (transformers, peft, torch's AdamW) with one thread, as is best for them where
there are fewer cores than processes; the server takes all cores. All eight train at once, each on rows of
its own size and mask. `throughput`: tokens a second of all together. `memory`: the most memory of all
processes during a step, by proportional set size, so that what they share counts once.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.pairs import Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result, paired
from benchmarks.train_rows import equal_rows, write_rows

MODEL = "smollm2-135m-instruct"
POLICIES = 8
ROWS, LENGTH = 4, 128
SAMPLE_S = 0.25
MEMORY_REPS = 3
BASELINE = "eight processes with one thread each: transformers, peft, AdamW"
CASES = ("throughput", "memory")


class _Peak:
    """The most memory that processes and their children take while it runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.mib = 0.0

    def __enter__(self) -> "_Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mib = max(self.mib, sum(_pss(pid) for pid in self._pids) / 2**20)
            if self._stopped.wait(SAMPLE_S):
                return


def _pss(pid: int) -> int:
    """Proportional set size of a process and its children, in bytes."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def run(options: Options) -> Iterable[Result]:
    from opentinker_kit.models import resolve_model

    unknown = options.cases - set(CASES)
    if unknown:
        raise SystemExit(f"unknown case {min(unknown)!r}")
    model_dir = resolve_model(MODEL, model_roots=[]).path
    cores = str(len(os.sched_getaffinity(0)))
    rows = equal_rows(ROWS, LENGTH)

    def start(stack: ExitStack) -> tuple[list[Program], list[Program]]:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ot-rows-"))) / "rows.json"
        write_rows(rows, path)

        def program(module: str, threads: str, *arguments: str) -> Program:
            env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
            made = Program(module, "--rows", str(path), "--threads", threads, *arguments, env=env)
            return stack.enter_context(made)

        plain = ("--model-dir", str(model_dir), "--micro-batch-rows", str(ROWS))
        server = program("train_ours", cores, "--policies", str(POLICIES))
        return [server], [program("train_plain", "1", *plain) for _ in range(POLICIES)]

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        server, others = start(stack)
        return lambda: _together(server), lambda: _together(others)

    if options.wants("throughput"):
        yield measure(
            options,
            "multilora",
            "throughput",
            sides,
            baseline=BASELINE,
            work=POLICIES * sum(len(row.token_ids) for row in rows),
            unit="tokens_per_s",
        )
    if options.wants("memory"):
        ours, theirs = [], []
        with ExitStack() as stack:
            server, others = start(stack)
            for _ in range(min(options.pairs, MEMORY_REPS)):
                ours.append(_peak_of(server))
                theirs.append(_peak_of(others))
        yield paired("multilora", "memory", ours, theirs, baseline=BASELINE, unit="pss_mib")
    forget("multilora", CASES)


def _together(programs: Sequence[Program]) -> float:
    """A step of all at once; the seconds of the slowest."""
    for program in programs:
        program.send()
    return max(program.receive()["seconds"] for program in programs)


def _peak_of(programs: Sequence[Program]) -> float:
    """The most memory during a step of all at once, in MiB."""
    with _Peak([program.pid for program in programs]) as peak:
        _together(programs)
    return round(peak.mib, 1)
