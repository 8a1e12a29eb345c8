"""How fast the trainer trains, against what one would use instead. SmolLM2-135M, LoRA of rank 16.

`equal` and `ragged`: tokens (without padding) a second of a whole optimizer step, from a request to its
result, over a plain loop of transformers, peft and torch's AdamW on the same rows, mask, precision and
threads. The loop takes micro-batches of 8 rows in arrival order, padded. `equal` has rows of one length.
`ragged` has 64 rows of log-normal lengths (sigma 1, mean 120, cut at 1,024). `trl`: a GRPO step on recorded
rollouts, 8 groups of 8, over the training step of TRL's GRPOTrainer (without its rollout phase).
`equal_full` and `ragged_full` (reported): the first two with all parameters trained.

A case may need more time than one run gives it; then the same command goes on (exit status 3 says so).
"""

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.pairs import Options, forget, measure
from benchmarks.programs import Program
from benchmarks.results import Result
from benchmarks.train_rows import TrainRow, equal_rows, ragged_rows, write_rows
from benchmarks.train_trl import ensure_trl, recorded_rows

MODEL = "smollm2-135m-instruct"
DTYPE = "float32"
ROWS: dict[str, Callable[[], list[TrainRow]]] = {"equal": equal_rows, "ragged": ragged_rows}
DEFAULT_CASES = ("equal", "ragged", "trl")
PLAIN = "plain loop: transformers, AdamW, micro-batches of 8 rows in arrival order"
TRL = "TRL GRPOTrainer, its training step"


def run(options: Options) -> Iterable[Result]:
    from opentinker_kit.models import resolve_model

    model_dir = resolve_model(MODEL, model_roots=[]).path
    cases = sorted(options.cases or DEFAULT_CASES)
    for case in cases:
        kind, _, tuning = case.partition("_")
        if kind not in (*ROWS, "trl") or tuning not in ("", "full") or (kind, tuning) == ("trl", "full"):
            raise SystemExit(f"unknown case {case!r}")
    for case in cases:
        kind, _, tuning = case.partition("_")
        if kind == "trl":
            ensure_trl()
        rows = recorded_rows() if kind == "trl" else ROWS[kind]()
        yield _case(options, case, rows, model_dir, tuning or "lora", trl=kind == "trl")
    forget("trainer", cases)


def _case(
    options: Options, case: str, rows: list[TrainRow], model_dir: Path, tuning: str, *, trl: bool
) -> Result:
    threads = str(len(os.sched_getaffinity(0)))
    env = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    shared = ["--dtype", DTYPE, "--threads", threads, *(() if trl else ("--tuning", tuning))]

    def sides(stack: ExitStack) -> tuple[Callable[[], float], Callable[[], float]]:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ot-rows-"))) / "rows.json"
        write_rows(rows, path)
        both = ["--rows", str(path), *shared]
        ours = stack.enter_context(Program("train_ours", *both, env=env))
        module = "train_trl" if trl else "train_plain"
        theirs = stack.enter_context(Program(module, "--model-dir", str(model_dir), *both, env=env))
        return lambda: ours.ask()["seconds"], lambda: theirs.ask()["seconds"]

    return measure(
        options,
        "trainer",
        case,
        sides,
        baseline=TRL if trl else PLAIN,
        work=sum(len(row.token_ids) for row in rows),
        unit="tokens_per_s",
        warm_up=not case.startswith("ragged"),
    )
