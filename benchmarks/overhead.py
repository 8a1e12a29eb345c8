"""What the services cost: `fit()` on the embedded stack against a plain loop in one process.

12 steps on recorded rollouts, the first 2 dropped, 5 interleaved pairs, medians over steps. Cases: `share`
(part of a step's wall time outside engine work, as the engine processes measure it), `plain_loop` (our step
over the plain loop's) and `noop` (milliseconds of a step on engines that answer at once).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.results import Result, interval_of_median, paired

PAIRS = 5
DROPPED = 2
MODEL = "smollm2-135m-instruct"
RECORDING = Path(__file__).parent / "data" / "rollouts.json"
TIMEOUT_S = 600

Measure = Callable[[str], list[dict[str, float]]]
"""Figures of each step, from a run in the folder of this name."""


def _lines(module: str, key: str, *arguments: str) -> list[dict[str, float]]:
    """What a program of this package prints about its steps, without the first ones."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(f'{{"{key}"')]
    return rows[DROPPED:]


def _median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _fit(directory: str, *, noop: bool = False) -> list[dict[str, float]]:
    arguments = ["--model", MODEL, "--recording", str(RECORDING), "--work-dir", directory]
    return _lines("recorded_fit", "fit_step", *arguments, *(["--noop"] if noop else []))


def _plain(model_dir: Path, directory: str) -> list[dict[str, float]]:
    arguments = ("--model-dir", str(model_dir), "--recording", str(RECORDING), "--work-dir", directory)
    return _lines("plain_loop", "plain_step", *arguments)


def run() -> Iterable[Result]:
    from opentinker_kit.models import resolve_model

    model_dir = resolve_model(MODEL, model_roots=[]).path
    ours: list[list[dict[str, float]]] = []
    plain: list[list[dict[str, float]]] = []
    noop: list[list[dict[str, float]]] = []
    measures: list[tuple[list[list[dict[str, float]]], Measure]] = [
        (ours, _fit),
        (plain, partial(_plain, model_dir)),
        (noop, partial(_fit, noop=True)),
    ]
    for _ in range(PAIRS):
        for rows, measure in measures:
            with tempfile.TemporaryDirectory(prefix="ot-overhead-") as directory:
                rows.append(measure(directory))
            sys.stderr.write(f"{rows[-1]}\n")
    shares = [statistics.median(row["outside_engine"] / row["step"] for row in rows) for rows in ours]
    middle, low, high = interval_of_median(shares)
    parts = [name for name in ours[0][0] if name not in ("fit_step", "rows")]
    raw = {name: [round(_median(rows, name), 4) for rows in ours] for name in parts}
    yield Result("overhead", "share", middle, "lower", low, high, PAIRS, "the step's wall time", raw)
    yield paired(
        "overhead",
        "plain_loop",
        [_median(rows, "step") for rows in ours],
        [_median(rows, "total") for rows in plain],
        baseline="plain loop in one process",
        unit="s",
    )
    idle = [1000 * _median(rows, "step") for rows in noop]
    middle, low, high = interval_of_median(idle)
    yield Result("overhead", "noop", middle, "lower", low, high, PAIRS, "none: ms per step", {"ms": idle})
