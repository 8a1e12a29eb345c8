"""Runs: the durable record of one fit() or sft(), written by clients."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from opentinker_kit.blob_keys import blob_key
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_scheduler.application.blobs import check_blob
from opentinker_scheduler.application.changes import note_progress
from opentinker_scheduler.domain.names import MAX_NAME, check_text, new_id, require, split
from opentinker_scheduler.domain.records import (
    Artifact,
    Blob,
    Fact,
    Groups,
    LoopState,
    MetricsRow,
    Run,
    RunState,
)
from opentinker_scheduler.ports import Transaction
from opentinkerapi.runtime.reasons import Reason

MAX_CONFIG_BYTES = 1 << 20
MAX_STATE_BYTES = 2 << 20
MAX_METRIC_ROWS = 10_000
MAX_METRICS = 1_000
MAX_MEDIA_TYPE = 127
_ARTIFACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")


class Runs:
    """See the module's text. Methods with a transaction are called inside one."""

    def __init__(self, store: ObjectStore | None, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def create(self, tx: Transaction, run: Run) -> Run:
        if len(run.config_json.encode()) > MAX_CONFIG_BYTES:
            text = f"config_json is over {MAX_CONFIG_BYTES} bytes"
            raise ServiceError(Reason.INVALID_FIELD, text, field="run.config_json")
        check_text(run.display_name, MAX_NAME, "run.display_name")
        self._check_job(tx, run.job, "run.job", run.project)
        now = self._clock.now()
        return tx.runs.add(replace(run, id=new_id(), create_time=now, update_time=now))

    def run(self, tx: Transaction, name: str, scope: str | None) -> Run:
        """RUN_NOT_FOUND, also for one outside the project that is looked at (None: all)."""
        (run_id,) = require(name, Reason.RUN_NOT_FOUND, "run", "runs")
        run = tx.runs.find(run_id)
        if run is None or scope not in (None, run.project):
            raise ServiceError(Reason.RUN_NOT_FOUND, f"there is no run {name}", field="run")
        return run

    def update(
        self, tx: Transaction, name: str, job: str | None, state: RunState | None, scope: str | None
    ) -> Run:
        """Change who works on a run, and where it stands."""
        run = self.run(tx, name, scope)
        if job is not None:
            self._check_job(tx, job, "job", run.project)
            run = replace(run, job=job)
        if state is not None:
            run = replace(run, state=state)
        return self._save(tx, run)

    def append_metrics(
        self, tx: Transaction, name: str, rows: Sequence[MetricsRow], scope: str | None
    ) -> None:
        """Record rows; a step that is there already is replaced."""
        run = self.run(tx, name, scope)
        if len(rows) > MAX_METRIC_ROWS:
            raise ServiceError(Reason.INVALID_FIELD, f"at most {MAX_METRIC_ROWS} rows a call", field="rows")
        for index, row in enumerate(rows):
            _check_row(row, index)
        now = self._clock.now()
        rows = [row if row.time.timestamp() > 0 else replace(row, time=now) for row in rows]
        tx.runs.put_metrics(run.id, rows)
        for row in rows:
            fact = Fact("metrics_step", run.name, detail={"step": row.step}, values=row.values)
            tx.outbox.add(fact, row.time)
        self._save(tx, replace(run, step=max([run.step, *(row.step for row in rows)])))
        note_progress(tx, run.job.removeprefix("jobs/"), now)

    async def check_stored(self, blob: Blob, field: str, project: str) -> None:
        """BLOB_NOT_FOUND unless the project has the bytes that a record will point to."""
        check_blob(blob, field)
        if self._store is None:
            raise ServiceError(Reason.STORAGE_UNAVAILABLE, "this cluster has no object store")
        if await self._store.head(blob_key(blob.sha256, project)) is None:
            text = f"there are no bytes with SHA-256 {blob.sha256}; upload them first (CreateUpload)"
            raise ServiceError(Reason.BLOB_NOT_FOUND, text, field=field)

    def put_loop_state(self, tx: Transaction, name: str, state: LoopState, scope: str | None) -> None:
        """Record the newest loop state. STALE_STEP if the one on record is newer."""
        run = self.run(tx, name, scope)
        if state.step < 0:
            raise ServiceError(Reason.INVALID_FIELD, "step must not be negative", field="loop_state.step")
        if len(state.state) > MAX_STATE_BYTES:
            text = f"state has {len(state.state)} bytes; over {MAX_STATE_BYTES} it belongs into state_blob"
            raise ServiceError(Reason.INVALID_FIELD, text, field="loop_state.state")
        _check_own(tx, state.checkpoint, run.project)
        known = tx.runs.find_loop_state(run.id)
        if known is not None and known.step > state.step:
            text = f"the loop state on record is of step {known.step}, newer than step {state.step}"
            raise ServiceError(Reason.STALE_STEP, text, metadata={"step": known.step})
        tx.runs.put_loop_state(run.id, state)
        self._save(tx, run)

    def loop_state(self, tx: Transaction, name: str, scope: str | None) -> LoopState:
        run = self.run(tx, name, scope)
        state = tx.runs.find_loop_state(run.id)
        if state is None:
            raise ServiceError(Reason.LOOP_STATE_NOT_FOUND, f"{name} has no loop state yet", field="run")
        return state

    def put_groups(self, tx: Transaction, name: str, groups: Groups, scope: str | None) -> None:
        run = self.run(tx, name, scope)
        if groups.step < 0 or groups.groups < 0:
            raise ServiceError(Reason.INVALID_FIELD, "step and groups must not be negative", field="groups")
        tx.runs.put_groups(run.id, groups)

    def put_artifact(self, tx: Transaction, name: str, artifact: Artifact, scope: str | None) -> None:
        run = self.run(tx, name, scope)
        if _ARTIFACT.fullmatch(artifact.name) is None or ".." in artifact.name:
            text = (
                f"{artifact.name!r} is no artifact name (at most 255 letters, digits, dots, dashes, slashes)"
            )
            raise ServiceError(Reason.INVALID_FIELD, text, field="artifact.name")
        check_text(artifact.media_type, MAX_MEDIA_TYPE, "artifact.media_type")
        tx.runs.put_artifact(run.id, artifact)

    def _save(self, tx: Transaction, run: Run) -> Run:
        run = replace(run, update_time=self._clock.now())
        tx.runs.save(run)
        return run

    def _check_job(self, tx: Transaction, job: str, field: str, project: str) -> None:
        if job:
            (job_id,) = require(job, Reason.INVALID_FIELD, "job", "jobs")
            found = tx.jobs.find(job_id)
            if found is None or found.project != project:
                raise ServiceError(Reason.INVALID_FIELD, f"there is no job {job}", field=field)


def _check_own(tx: Transaction, checkpoint: str, project: str) -> None:
    """INVALID_FIELD for a checkpoint of another project: naming one keeps it from being deleted.

    One that nobody knows may still come: a trainer registers it while the loop goes on.
    """
    ids = split(checkpoint, "policies", "checkpoints")
    policy = tx.catalog.find_policy(ids[0]) if ids is not None else None
    if policy is not None and policy.project != project:
        text = f"there is no checkpoint {checkpoint}"
        raise ServiceError(Reason.INVALID_FIELD, text, field="loop_state.checkpoint")


def _check_row(row: MetricsRow, index: int) -> None:
    if row.step < 0:
        raise ServiceError(Reason.INVALID_FIELD, "step must not be negative", field=f"rows[{index}].step")
    if len(row.values) > MAX_METRICS:
        text = f"at most {MAX_METRICS} metrics a row"
        raise ServiceError(Reason.INVALID_FIELD, text, field=f"rows[{index}].values")
    for key, value in row.values.items():
        if not math.isfinite(value):
            text = f"{key} is {value}; metrics must be finite, leave out what is not"
            raise ServiceError(Reason.INVALID_FIELD, text, field=f"rows[{index}].values[{key}]")
