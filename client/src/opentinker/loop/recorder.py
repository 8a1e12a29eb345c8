"""What `fit()` and `sft()` say while they run: metrics to loggers and to the run's record, news to a person
and to callbacks.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from opentinker import errors
from opentinker.connection.cluster import Cluster
from opentinker.connection.runs import RunRecord
from opentinker.loop.loggers import METRICS_FILE, Callback, JsonlLogger, Logger, RecordLogger
from opentinker.loop.progress import REINFORCEMENT, ClipWatch, Column, Evaluated, progress
from opentinker.training.results import Checkpoint
from opentinkerapi.run.v1 import run_pb2

STATE_VERSION = 1


E = TypeVar("E", bound=Evaluated)


class RunPlan(Protocol):
    """What there is to know of a run's settings."""

    @property
    def name(self) -> str: ...

    @property
    def run_dir(self) -> Path | None: ...

    @property
    def loggers(self) -> Sequence[Any]: ...

    @property
    def callbacks(self) -> Sequence[Any]: ...

    @property
    def progress(self) -> bool | None: ...

    def describe(self) -> dict[str, Any]: ...


class Recorder(Generic[E]):
    """Open while a run goes on; records how it ended."""

    def __init__(
        self,
        plan: RunPlan,
        record: RunRecord,
        steps: int,
        columns: Sequence[Column],
        reply_limit: int | None,
        keep_steps: int | None,
    ) -> None:
        self.run = record.name
        self.directory = plan.run_dir or Path("runs") / record.name.rsplit("/", 1)[-1]
        self.rows: list[dict[str, float]] = []
        self.evaluations: list[tuple[int, E]] = []
        self._record = record
        self._progress = progress(plan.progress, steps, plan.name or record.name, columns)
        self._clipping = ClipWatch()
        self._reply_limit = reply_limit
        self._callbacks: list[Callback] = list(plan.callbacks)
        jsonl = JsonlLogger(self.directory / METRICS_FILE, keep_steps)
        self._loggers: list[Logger] = [jsonl, RecordLogger(record), *plan.loggers]

    @classmethod
    async def open(
        cls,
        plan: RunPlan,
        cluster: Cluster,
        *,
        kind: str = "fit",
        steps: int,
        columns: Sequence[Column] = REINFORCEMENT,
        reply_limit: int | None = None,
        resume: tuple[str, int] | None = None,
    ) -> Self:
        """Make the run's record at the cluster. `reply_limit` is the `max_tokens` that warnings name.

        `resume` names a run to go on with instead, and the last of its steps that counts.
        """
        if resume is None:
            record = await cluster.create_run(plan.name or kind, plan.describe(), f"run-{uuid.uuid4().hex}")
            return cls(plan, record, steps, columns, reply_limit, None)
        record = cluster.open_run(resume[0])
        await record.update(state=run_pb2.RUN_STATE_ACTIVE)
        return cls(plan, record, steps, columns, reply_limit, resume[1])

    def expect(self, steps: int) -> None:
        """How many steps there will be, where it was not known at first."""
        self._progress.expect(steps)

    async def __aenter__(self) -> Self:
        self._progress.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        for logger in self._loggers:
            logger.close()
        state = run_pb2.RUN_STATE_SUCCEEDED if error is None else run_pb2.RUN_STATE_FAILED
        try:
            await self._record.update(state=state)
        except errors.OpenTinkerError:
            # How the run itself ended matters more than that it could not be noted.
            if error is None:
                self._progress.note(f"{self.run}: its end could not be recorded at the cluster")

    async def working_on(self, job: str) -> None:
        """Note the job that works on the run."""
        await self._record.update(job=job)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended."""
        row = {**metrics, "training/global_step": float(step)}
        self.rows.append(row)
        self._log(step, row)
        self._progress.step(step, row)
        warning = self._clipping.check(row.get("response/clip_ratio", 0.0), self._reply_limit)
        if warning:
            self._progress.note(f"warning: {warning}")
        for callback in self._callbacks:
            callback.on_step(step, row)

    def evaluated(self, step: int, result: E) -> None:
        """An evaluation has ended. Its numbers stand in a row of their own."""
        self.evaluations.append((step, result))
        self._log(step, {**result.metrics(), "training/global_step": float(step)})
        self._progress.evaluated(step, result)
        for callback in self._callbacks:
            callback.on_evaluation(step, result)

    async def saved(self, step: int, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """A checkpoint has been saved: what the loop needs beside it goes to the cluster."""
        body = json.dumps({"state_version": STATE_VERSION, "step": step, **state}, sort_keys=True)
        await self._record.put_loop_state(step, checkpoint.name, body.encode())
        for callback in self._callbacks:
            callback.on_checkpoint(step, checkpoint)

    def note(self, text: str) -> None:
        """Something a person should know."""
        self._progress.note(text)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, metrics)
