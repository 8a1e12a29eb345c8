"""What the loss adds to the memory of a training pass: 4,096 tokens, a vocabulary of 49,152, SmolLM2-135M.

`peak`: the most memory of a ForwardBackward that trains on all 4,096 tokens over that of the same model's
forward and backward pass with the logits of one chunk of 256 tokens, each in a process of its own and
counted from the loaded model. All logits at once would take 805 MB, and as much again for their gradient.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable

from benchmarks.pairs import Options
from benchmarks.results import Result, paired

REPS = 3
TIMEOUT_S = 900


def run(options: Options) -> Iterable[Result]:
    if not options.wants("peak"):
        raise SystemExit("the only case is 'peak'")
    ours, theirs = [], []
    for _ in range(min(options.pairs, REPS)):
        ours.append(_peak("ours"))
        theirs.append(_peak("chunk"))
    yield paired(
        "loss_memory",
        "peak",
        ours,
        theirs,
        baseline="the model's own pass with the logits of one chunk",
        unit="peak_mib",
    )


def _peak(kind: str) -> float:
    threads = str(len(os.sched_getaffinity(0)))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss_peak", "--kind", kind, "--threads", threads],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["peak_mib"])
