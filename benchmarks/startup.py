"""How long a user waits before anything happens.

`import`: what a first program loads of `opentinker` (FIRST_PROGRAM) over `import grpc, numpy`, both from
bytecode as an installed package has it; a checkout is compiled at every start where PYTHONDONTWRITEBYTECODE
is set. The raw figure `every_name_s` is of all public names. `stack`: the embedded stack without a model,
until it is ready, over nats-server and weed alone, until both answer. Each repetition: new processes, new
directories.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.results import Result, paired

IMPORT_REPS = 41
STACK_REPS = 7
LOAD = "import opentinker as ot; [getattr(ot, name) for name in {names}]"
"""Names are loaded when they are first used, so `import opentinker` alone would measure nothing."""
FIRST_PROGRAM = ("connect", "fit", "run", "LoRA", "GRPO")
"""What the README's first program uses."""


def _import_seconds(statement: str, bytecode: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
    return time.perf_counter() - begin


def _stack_seconds() -> float:
    from opentinker_local import start_stack, stop_stack

    with tempfile.TemporaryDirectory(prefix="ot-bench-") as directory:
        begin = time.perf_counter()
        start_stack(Path(directory), owned=False)
        seconds = time.perf_counter() - begin
        stop_stack(Path(directory))
    return seconds


def _bare_seconds() -> float:
    from opentinker_kit.testing import start_nats, start_weed

    with tempfile.TemporaryDirectory(prefix="ot-bench-") as directory:
        begin = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            nats = pool.submit(start_nats, Path(directory) / "nats")
            weed = pool.submit(start_weed, Path(directory) / "weed")
        seconds = time.perf_counter() - begin
        with nats.result(), weed.result():
            return seconds


def run() -> Iterable[Result]:
    ours, theirs, whole = [], [], []
    with tempfile.TemporaryDirectory(prefix="ot-bench-") as bytecode:
        for repetition in range(IMPORT_REPS + 1):
            mine = _import_seconds(LOAD.format(names=FIRST_PROGRAM), bytecode)
            other = _import_seconds("import grpc, numpy", bytecode)
            every = _import_seconds(LOAD.format(names="ot.__all__"), bytecode)
            if repetition > 0:  # the first writes the bytecode and fills the page cache
                ours.append(mine)
                theirs.append(other)
                whole.append(every)
    result = paired("startup", "import", ours, theirs, baseline="import grpc, numpy", unit="s")
    yield replace(result, raw={**result.raw, "every_name_s": round(statistics.median(whole), 4)})
    ours, theirs = [], []
    for repetition in range(STACK_REPS + 1):
        mine, other = _stack_seconds(), _bare_seconds()
        if repetition > 0:
            ours.append(mine)
            theirs.append(other)
    yield paired("startup", "stack", ours, theirs, baseline="nats-server and weed alone", unit="s")
