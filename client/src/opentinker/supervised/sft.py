"""`sft()`: supervised fine-tuning on a data set, in one call. The loop itself is in `supervised.loop`."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opentinker.connection.cluster import Cluster
from opentinker.connection.opening import active_cluster
from opentinker.environments.rows import Source
from opentinker.errors import invalid
from opentinker.loop.algorithms import Schedule
from opentinker.loop.loggers import check_callbacks, check_loggers
from opentinker.supervised.batches import BatchSize
from opentinker.supervised.data import read
from opentinker.supervised.encoding import RewrittenHistory, TooLong, TrainOn
from opentinker.supervised.result import SftResult
from opentinker.supervised.settings import (
    BATCH_ROWS,
    CLIP_NORM,
    LEARNING_RATE,
    Decay,
    Plan,
    refuse_unknown,
)
from opentinker.training.results import Checkpoint
from opentinker.training.tuning import AdamW, JobOptions, LoRA, ServerOptions, Tuning


def sft(
    data: Source,
    model: str,
    *,
    tuning: Tuning | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    learning_rate: Schedule = LEARNING_RATE,
    warmup: int = 0,
    decay: Decay = "none",
    optimizer: AdamW | None = None,
    evaluation: Source | None = None,
    evaluation_every: int | None = None,
    train_on: TrainOn = "all",
    rewritten_history: RewrittenHistory = "refuse",
    max_tokens: int | None = None,
    too_long: TooLong = "refuse",
    ignore_columns: Sequence[str] = (),
    shuffle: bool = True,
    seed: int = 0,
    name: str = "",
    run_dir: str | Path | None = None,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    checkpoint_every: int | None = None,
    from_checkpoint: Checkpoint | str = "",
    resume: str = "",
    trainer: ServerOptions | None = None,
    inference: ServerOptions | None = None,
    job: JobOptions | None = None,
    serve: bool = False,
    stop_after_skipped: int = 5,
    progress: bool | None = None,
    cluster: Cluster | None = None,
    **unknown: Any,
) -> SftResult:
    """Train a policy over `model` to say what the assistant says in `data`, publish it, and return.

    `data`: rows {"messages": [...], "tools"?} or {"prompt", "completion"}, as any iterable, a .jsonl or
    .parquet file, a Hugging Face data set or the directory of one. Every row is checked before anything
    starts. A step learns from `batch_size` rows (default 16) or from as many as `batch_tokens` hold; its loss
    is the mean over all their trained tokens, whatever the trainer makes of the batch. `epochs` (default 1)
    or `steps` say how long.

    `train_on` "all" assistant turns or the "last"; messages may have `train` (bool) or `weight` (any number)
    of their own, and rows a `weight`. `rewritten_history`, for templates that strip reasoning from earlier
    turns: "refuse", or "split" such a conversation into several rows. Rows longer than `max_tokens` (default:
    what the trainer takes) are an error, or with `too_long="drop"` left out and counted (`SftResult.data`).
    Nothing is ever cut.

    `learning_rate` is a number, with `warmup` steps and a `decay` to 0 at the end of the run, or a function
    of the step (`ot.schedules`). `evaluation` has held-out rows: their loss is measured before and after, and
    each `evaluation_every` steps. With `checkpoint_every` a checkpoint is saved each so many steps and at the
    end. `from_checkpoint` gives the policy the weights of one (of the same tuning) to start from, here as in
    `fit()`; `resume` names a run instead and goes on from its last one, given the same data and settings.

    The job has a trainer slot; `serve` adds an inference slot. Without it, one is taken when the result is
    first sampled. `job` has its priority and limits. Without a `cluster` the innermost open one is used, or
    an embedded stack is started.
    """
    plan = _plan(locals())
    chosen = cluster if cluster is not None else active_cluster()
    return chosen.portal.run(_train(plan, chosen))


async def sft_async(data: Source, model: str, *, cluster: Cluster | None = None, **options: Any) -> SftResult:
    """`sft()` for coroutines of any event loop; takes the same options."""
    known = {name: value for name, value in options.items() if name in _DEFAULTS}
    unknown = {name: value for name, value in options.items() if name not in _DEFAULTS}
    given = {**_DEFAULTS, **known, "data": data, "model": model, "unknown": unknown}
    plan = await asyncio.to_thread(_plan, given)
    chosen = cluster if cluster is not None else await asyncio.to_thread(active_cluster)
    return await chosen.portal.bridge(_train(plan, chosen))


def _train(plan: Plan, cluster: Cluster) -> Coroutine[Any, Any, SftResult]:
    # Loaded when a run begins: who imports the package does not wait for it.
    from opentinker.supervised.loop import train

    return train(plan, cluster)


_DEFAULTS: dict[str, Any] = {
    key: value for key, value in (sft.__kwdefaults__ or {}).items() if key != "cluster"
}


def _plan(given: Mapping[str, Any]) -> Plan:
    """Read the rows, and check everything that can be checked before anything is started."""
    refuse_unknown(given["unknown"], list(_DEFAULTS))
    check_loggers(given["loggers"])
    check_callbacks(given["callbacks"])
    options = dict(given)
    for name in ("unknown", "cluster"):
        options.pop(name, None)
    rows, tokens = options.pop("batch_size"), options.pop("batch_tokens")
    if rows is None and tokens is None:
        rows = BATCH_ROWS
    options["batch"] = BatchSize(rows, tokens)
    if options["epochs"] is None and options["steps"] is None:
        options["epochs"] = 1
    ignored = options.pop("ignore_columns")
    data, evaluation = options.pop("data"), options.pop("evaluation")
    options |= {
        name: value
        for name, value in {"tuning": LoRA(), "optimizer": AdamW(clip_norm=CLIP_NORM)}.items()
        if options[name] is None
    }
    start = options["from_checkpoint"]
    options["from_checkpoint"] = start.name if isinstance(start, Checkpoint) else start
    options["run_dir"] = Path(options["run_dir"]) if options["run_dir"] is not None else None
    if evaluation is None and options["evaluation_every"] is not None:
        raise invalid("evaluation_every", "there is no evaluation data")
    # Settings first: they are checked in no time, a data set may take minutes to read.
    plan = Plan(rows=(), held_out=(), **options)
    rows_read = read(data, "data", ignored)
    held_out = [] if evaluation is None else read(evaluation, "evaluation", ignored)
    return replace(plan, rows=rows_read, held_out=held_out)
