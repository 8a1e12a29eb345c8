"""The catalog and runs as messages."""

from datetime import UTC, datetime

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.model import Tuning
from opentinker_scheduler.domain.names import split
from opentinker_scheduler.domain.records import (
    Artifact,
    Blob,
    Checkpoint,
    Groups,
    LoopState,
    MetricsRow,
    Policy,
    Run,
    RunState,
    Version,
)
from opentinker_scheduler.wire.jobs import read_enum, timestamp
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.run.v1 import run_pb2
from opentinkerapi.runtime.reasons import Reason

_UNSET = datetime(1970, 1, 1, tzinfo=UTC)

RUN_STATES = {
    run_pb2.RUN_STATE_UNSPECIFIED: RunState.ACTIVE,
    run_pb2.RUN_STATE_ACTIVE: RunState.ACTIVE,
    run_pb2.RUN_STATE_SUCCEEDED: RunState.SUCCEEDED,
    run_pb2.RUN_STATE_FAILED: RunState.FAILED,
}
_RUN_STATE_OUT = {value: key for key, value in RUN_STATES.items()}


def read_policy(policy: policy_pb2.Policy) -> Policy:
    """A policy to record. INVALID_FIELD where a name is no name."""
    ids = split(policy.name, "policies")
    if ids is None:
        raise ServiceError(Reason.INVALID_FIELD, f"{policy.name!r} is no policy name", field="policy.name")
    job_id = ""
    if policy.job:
        job = split(policy.job, "jobs")
        if job is None:
            raise ServiceError(Reason.JOB_NOT_FOUND, f"there is no job {policy.job}", field="policy.job")
        job_id = job[0]
    kind = policy.tuning.WhichOneof("kind")
    if kind is None:
        raise ServiceError(Reason.INVALID_FIELD, "tuning must be lora or full", field="policy.tuning")
    lora = policy.tuning.lora
    return Policy(
        id=ids[0],
        project="default",
        job_id=job_id,
        base_model=policy.base_model,
        base_digest=policy.base_digest,
        tuning=Tuning.LORA if kind == "lora" else Tuning.FULL,
        rank=lora.rank,
        alpha=lora.alpha if lora.HasField("alpha") else None,
        target_modules=tuple(lora.target_modules),
        seed=policy.seed,
        display_name=policy.display_name,
        latest_version=0,
        create_time=_UNSET,
        value_head=policy.tuning.value_head,
        activation_checkpointing=policy.tuning.activation_checkpointing,
    )


def write_policy(policy: Policy) -> policy_pb2.Policy:
    result = policy_pb2.Policy(
        name=policy.name,
        job=f"jobs/{policy.job_id}" if policy.job_id else "",
        base_model=policy.base_model,
        base_digest=policy.base_digest,
        seed=policy.seed,
        latest_version=policy.latest_version,
        create_time=timestamp(policy.create_time),
        display_name=policy.display_name,
        project=policy.project,
    )
    if policy.tuning is Tuning.LORA:
        result.tuning.lora.rank = policy.rank
        result.tuning.lora.target_modules.extend(policy.target_modules)
        if policy.alpha is not None:
            result.tuning.lora.alpha = policy.alpha
    else:
        result.tuning.full.SetInParent()
    result.tuning.value_head = policy.value_head
    result.tuning.activation_checkpointing = policy.activation_checkpointing
    return result


def read_version(version: policy_pb2.PolicyVersion) -> Version:
    return Version("", version.version, version.sha256, version.manifest_key, version.step, _UNSET)


def write_version(version: Version) -> policy_pb2.PolicyVersion:
    return policy_pb2.PolicyVersion(
        name=version.name,
        policy=f"policies/{version.policy_id}",
        version=version.version,
        sha256=version.sha256,
        manifest_key=version.manifest_key,
        step=version.step,
        create_time=timestamp(version.create_time),
    )


def read_checkpoint(checkpoint: policy_pb2.Checkpoint) -> Checkpoint:
    ids = split(checkpoint.name, "policies", "checkpoints")
    if ids is None:
        text = f"{checkpoint.name!r} is no checkpoint name"
        raise ServiceError(Reason.INVALID_FIELD, text, field="checkpoint.name")
    return Checkpoint(
        id=ids[1],
        policy_id=ids[0],
        sha256=checkpoint.sha256,
        manifest_key=checkpoint.manifest_key,
        step=checkpoint.step,
        version=checkpoint.version,
        size_bytes=checkpoint.size_bytes,
        display_name=checkpoint.display_name,
        create_time=_UNSET,
        expire_time=checkpoint.expire_time.ToDatetime(UTC) if checkpoint.HasField("expire_time") else None,
    )


def write_checkpoint(checkpoint: Checkpoint) -> policy_pb2.Checkpoint:
    expire_time = None if checkpoint.expire_time is None else timestamp(checkpoint.expire_time)
    return policy_pb2.Checkpoint(
        name=checkpoint.name,
        policy=f"policies/{checkpoint.policy_id}",
        sha256=checkpoint.sha256,
        manifest_key=checkpoint.manifest_key,
        step=checkpoint.step,
        version=checkpoint.version,
        size_bytes=checkpoint.size_bytes,
        create_time=timestamp(checkpoint.create_time),
        display_name=checkpoint.display_name,
        expire_time=expire_time,
    )


def read_run(run: run_pb2.Run, project: str) -> Run:
    return Run(
        id="",
        project=project,
        display_name=run.display_name,
        job=run.job,
        config_json=run.config_json,
        state=read_enum(RUN_STATES, run.state, "run.state", "run state"),
        step=0,
        create_time=_UNSET,
        update_time=_UNSET,
    )


def write_run(run: Run) -> run_pb2.Run:
    return run_pb2.Run(
        name=run.name,
        display_name=run.display_name,
        job=run.job,
        config_json=run.config_json,
        state=_RUN_STATE_OUT[run.state],
        step=run.step,
        create_time=timestamp(run.create_time),
        update_time=timestamp(run.update_time),
        project=run.project,
    )


def read_metrics(row: run_pb2.MetricsRow) -> MetricsRow:
    time = row.time.ToDatetime(UTC) if row.HasField("time") else _UNSET
    return MetricsRow(row.step, dict(row.values), time)


def write_metrics(row: MetricsRow) -> run_pb2.MetricsRow:
    return run_pb2.MetricsRow(step=row.step, values=row.values, time=timestamp(row.time))


def read_blob(blob: blob_pb2.BlobRef) -> Blob:
    return Blob(blob.sha256, blob.size_bytes, blob.uri)


def write_blob(blob: Blob) -> blob_pb2.BlobRef:
    return blob_pb2.BlobRef(sha256=blob.sha256, size_bytes=blob.size_bytes, uri=blob.uri)


def read_loop_state(state: run_pb2.LoopState) -> LoopState:
    blob = read_blob(state.state_blob) if state.HasField("state_blob") else None
    if blob is not None and state.state:
        raise ServiceError(
            Reason.INVALID_FIELD, "send state or state_blob, not both", field="loop_state.state"
        )
    return LoopState(state.step, state.checkpoint, state.state, blob)


def write_loop_state(state: LoopState) -> run_pb2.LoopState:
    blob = None if state.blob is None else write_blob(state.blob)
    return run_pb2.LoopState(step=state.step, checkpoint=state.checkpoint, state=state.state, state_blob=blob)


def read_groups(groups: run_pb2.GroupsRecord) -> Groups:
    return Groups(groups.step, read_blob(groups.blob), groups.groups)


def write_groups(groups: Groups) -> run_pb2.GroupsRecord:
    return run_pb2.GroupsRecord(step=groups.step, blob=write_blob(groups.blob), groups=groups.groups)


def read_artifact(artifact: run_pb2.Artifact) -> Artifact:
    return Artifact(artifact.name, read_blob(artifact.blob), artifact.media_type)


def write_artifact(artifact: Artifact) -> run_pb2.Artifact:
    return run_pb2.Artifact(
        name=artifact.name, blob=write_blob(artifact.blob), media_type=artifact.media_type
    )
