"""Interleaved pairs of measurements that a long benchmark can be resumed with.

Each pair is written down when it is there, with a digest of the code that it measured. A run takes up the
pairs of runs before it while that code is the same; a finished case begins anew the next time.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from benchmarks.results import Result, paired

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ("benchmarks", "services/trainer/src", "services/kit/src")
INFERENCE = ("benchmarks", "services/inference/src", "services/kit/src", "protos/src")
"""Folders with the code that a benchmark measures."""
DEFAULT_PAIRS = 9
DEFAULT_BUDGET_S = 600.0


class Unfinished(Exception):
    """The time of this run is over; the same command goes on."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    pairs: int = DEFAULT_PAIRS
    cases: frozenset[str] = frozenset()
    """Empty: all."""
    budget_s: float = DEFAULT_BUDGET_S
    """After so many seconds no further pair is begun."""
    started: float = field(default_factory=time.monotonic)

    def wants(self, case: str) -> bool:
        return not self.cases or case in self.cases

    def time_is_over(self) -> bool:
        return time.monotonic() - self.started > self.budget_s


def _digest(measured: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for folder in measured:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _notes(bench: str, case: str) -> Path:
    folder = Path(os.environ.get("OPENTINKER_BENCH_DIR", ROOT / ".bench"))
    return folder / f"{bench}-{case}.json"


Sides = Callable[[ExitStack], tuple[Callable[[], float], Callable[[], float]]]
"""Starts what is measured: two functions that do the same work and return its seconds, ours and theirs."""


def measure(
    options: Options,
    bench: str,
    case: str,
    sides: Sides,
    *,
    baseline: str,
    work: float,
    unit: str,
    warm_up: bool = True,
    extra: Callable[[], Mapping[str, object]] | None = None,
    measured: Sequence[str] = TRAINER,
    better: Literal["higher", "lower"] = "higher",
) -> Result:
    """How fast we are over how fast they are: medians of interleaved pairs of seconds for the same `work`.

    Unfinished if the time was not enough. The order within a pair alternates. `raw` holds work per second
    (or seconds, where lower is `better`), and what `extra` gives, which is called once after the warm-up.
    Nothing is started where all pairs are known.
    """
    notes = _notes(bench, case)
    digest = _digest(measured)
    kept: list[list[float]] = []
    figures: Mapping[str, object] | None = None if extra else {}
    if notes.exists():
        noted = json.loads(notes.read_text())
        if noted["digest"] == digest:
            kept, figures = noted["pairs"], noted["extra"]
    if len(kept) < options.pairs:
        with ExitStack() as stack:
            ours, theirs = sides(stack)
            if warm_up:
                ours()
                theirs()
            if figures is None and extra is not None:
                figures = extra()
            began = False
            while len(kept) < options.pairs:
                if began and options.time_is_over():
                    done = f"{bench}/{case}: {len(kept)} of {options.pairs} pairs"
                    raise Unfinished(f"{done}; run it again to go on")
                began = True
                first, second = (ours, theirs) if len(kept) % 2 == 0 else (theirs, ours)
                times = [first(), second()]
                pair = times if first is ours else times[::-1]
                print(f"{bench}/{case}: ours {pair[0]:.2f} s, theirs {pair[1]:.2f} s", file=sys.stderr)
                kept.append(pair)
                notes.parent.mkdir(parents=True, exist_ok=True)
                notes.write_text(json.dumps({"digest": digest, "pairs": kept, "extra": figures}))
    kept = kept[: options.pairs]
    if better == "lower":
        mine, other = ([round(pair[side], 4) for pair in kept] for side in (0, 1))
    else:
        mine, other = ([round(work / pair[side], 2) for pair in kept] for side in (0, 1))
    result = paired(bench, case, mine, other, baseline=baseline, unit=unit, better=better)
    return replace(result, raw={**result.raw, **(figures or {})})


def forget(bench: str, cases: Iterable[str]) -> None:
    """The cases are finished: the next run measures anew."""
    for case in cases:
        _notes(bench, case).unlink(missing_ok=True)
