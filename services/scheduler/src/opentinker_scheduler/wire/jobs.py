"""Jobs, servers and sessions as messages."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application import sessions
from opentinker_scheduler.application.jobs import JobEndpoint, NewJob
from opentinker_scheduler.application.registry import Load, Registration
from opentinker_scheduler.application.usage import TokenCount
from opentinker_scheduler.domain.model import (
    AssignmentState,
    Failure,
    Job,
    JobKind,
    JobState,
    OnClientLoss,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.domain.prices import HOUR_S, NO_PRICES, Prices
from opentinker_scheduler.domain.shares import used
from opentinkerapi.runtime.reasons import CATALOGUE, Reason
from opentinkerapi.runtime.status import StatusData, encode
from opentinkerapi.scheduler.v1 import job_pb2, server_registry_service_pb2

registry_pb2 = server_registry_service_pb2
K = TypeVar("K")
V = TypeVar("V")

KINDS = {
    job_pb2.JOB_KIND_LORA_RL: JobKind.LORA_RL,
    job_pb2.JOB_KIND_INFERENCE: JobKind.INFERENCE,
    job_pb2.JOB_KIND_FULL_RL: JobKind.FULL_RL,
    job_pb2.JOB_KIND_SFT: JobKind.SFT,
}
STATES = {
    job_pb2.JOB_STATE_QUEUED: JobState.QUEUED,
    job_pb2.JOB_STATE_STARTING: JobState.STARTING,
    job_pb2.JOB_STATE_RUNNING: JobState.RUNNING,
    job_pb2.JOB_STATE_PAUSED: JobState.PAUSED,
    job_pb2.JOB_STATE_PREEMPTED: JobState.PREEMPTED,
    job_pb2.JOB_STATE_SUCCEEDED: JobState.SUCCEEDED,
    job_pb2.JOB_STATE_FAILED: JobState.FAILED,
    job_pb2.JOB_STATE_CANCELLED: JobState.CANCELLED,
}
ROLES = {job_pb2.SLOT_ROLE_TRAINER: Role.TRAINER, job_pb2.SLOT_ROLE_INFERENCE: Role.INFERENCE}
TUNINGS = {
    job_pb2.TUNING_KIND_UNSPECIFIED: Tuning.NONE,
    job_pb2.TUNING_KIND_LORA: Tuning.LORA,
    job_pb2.TUNING_KIND_FULL: Tuning.FULL,
}
ON_LOSS = {
    job_pb2.ON_CLIENT_LOSS_UNSPECIFIED: OnClientLoss.PAUSE,
    job_pb2.ON_CLIENT_LOSS_PAUSE: OnClientLoss.PAUSE,
    job_pb2.ON_CLIENT_LOSS_CANCEL: OnClientLoss.CANCEL,
    job_pb2.ON_CLIENT_LOSS_DETACH: OnClientLoss.DETACH,
}
SERVER_STATES = {
    ServerState.LAUNCHING: job_pb2.SERVER_STATE_LAUNCHING,
    ServerState.REGISTERED: job_pb2.SERVER_STATE_REGISTERED,
    ServerState.READY: job_pb2.SERVER_STATE_READY,
    ServerState.DRAINING: job_pb2.SERVER_STATE_DRAINING,
    ServerState.STOPPED: job_pb2.SERVER_STATE_STOPPED,
    ServerState.LOST: job_pb2.SERVER_STATE_LOST,
}
REPORTS: Mapping[registry_pb2.AssignmentState.ValueType, AssignmentState | None] = {
    registry_pb2.ASSIGNMENT_STATE_READY: AssignmentState.READY,
    registry_pb2.ASSIGNMENT_STATE_FAILED: None,
    registry_pb2.ASSIGNMENT_STATE_RELEASED: AssignmentState.ENDED,
}
_KIND_OUT = {value: key for key, value in KINDS.items()}
_STATE_OUT = {value: key for key, value in STATES.items()}
ROLE_OUT = {value: key for key, value in ROLES.items()}
_TUNING_OUT = {value: key for key, value in TUNINGS.items()}
_LOSS_OUT = {value: key for key, value in ON_LOSS.items()}


def read_enum(table: Mapping[K, V], value: K, field: str, what: str) -> V:
    """The value of an enum; INVALID_FIELD for a number that this version does not know."""
    if value not in table:
        raise ServiceError(Reason.INVALID_FIELD, f"{value} is no {what} that this server knows", field=field)
    return table[value]


def timestamp(time: datetime) -> Timestamp:
    result = Timestamp()
    result.FromDatetime(time)
    return result


def duration(seconds: float) -> Duration:
    result = Duration()
    result.FromTimedelta(timedelta(seconds=seconds))
    return result


def read_new_job(job: job_pb2.Job) -> NewJob:
    """What a client asks for; what it may ask for is decided elsewhere."""
    slots = tuple(_read_slot(slot, f"job.slots[{index}]") for index, slot in enumerate(job.slots))
    return NewJob(
        kind=read_enum(KINDS, job.kind, "job.kind", "job kind"),
        slots=slots,
        display_name=job.display_name,
        on_client_loss=read_enum(
            ON_LOSS, job.on_client_loss, "job.on_client_loss", "reaction to client loss"
        ),
        lease_ttl_s=_read_seconds(job, "lease_ttl"),
        labels=dict(job.labels),
        run=job.run,
        priority=job.priority,
        max_duration_s=_read_seconds(job, "max_duration"),
        idle_limit_s=_read_seconds(job, "idle_limit"),
    )


def _read_seconds(job: job_pb2.Job, name: str) -> float:
    """A duration in seconds, 0 where it is not set; INVALID_FIELD for one that is not positive."""
    if not job.HasField(name):  # type: ignore[arg-type]
        return 0.0
    value: Duration = getattr(job, name)
    seconds = value.seconds + value.nanos / 1e9
    if seconds <= 0:
        raise ServiceError(Reason.INVALID_FIELD, f"{name} must be positive", field=f"job.{name}")
    return seconds


def _read_slot(slot: job_pb2.SlotSpec, field: str) -> SlotSpec:
    return SlotSpec(
        role=read_enum(ROLES, slot.role, f"{field}.role", "slot role"),
        base_model=slot.base_model,
        tuning=read_enum(TUNINGS, slot.tuning, f"{field}.tuning", "tuning"),
        count=slot.count if slot.HasField("count") else 1,
        options=read_options(slot.options),
        exclusive=slot.options.exclusive,
    )


def read_options(options: job_pb2.ServerOptions) -> ServerOptions:
    return ServerOptions(
        engine=options.engine,
        dtype=options.dtype,
        serving_mode=options.serving_mode,
        max_lora_rank=options.max_lora_rank,
        context_tokens=options.context_tokens,
        ranks=options.ranks,
        accelerator=options.accelerator,
    )


def write_options(options: ServerOptions, *, exclusive: bool = False) -> job_pb2.ServerOptions:
    return job_pb2.ServerOptions(
        engine=options.engine,
        dtype=options.dtype,
        serving_mode=options.serving_mode,
        max_lora_rank=options.max_lora_rank,
        context_tokens=options.context_tokens,
        exclusive=exclusive,
        ranks=options.ranks,
        accelerator=options.accelerator,
    )


def write_job(job: Job, prices: Prices = NO_PRICES) -> job_pb2.Job:
    result = job_pb2.Job(
        name=job.name,
        display_name=job.display_name,
        kind=_KIND_OUT[job.kind],
        state=_STATE_OUT[job.state],
        state_reason=job.state_reason,
        queue_position=job.queue_position if job.state is JobState.QUEUED else 0,
        attempt=job.attempt,
        on_client_loss=_LOSS_OUT[job.on_client_loss],
        lease_ttl=duration(job.lease_ttl_s),
        create_time=timestamp(job.create_time),
        outcome_message=job.outcome_message,
        labels=job.labels,
        project=job.project,
        run=job.run,
        priority=job.priority,
        held_duration=duration(job.held_s),
        cost=_write_cost(job, prices),
    )
    if job.state is JobState.QUEUED and job.estimated_start_time is not None:
        result.estimated_start_time.FromDatetime(job.estimated_start_time)
    for name, seconds in (("max_duration", job.max_duration_s), ("idle_limit", job.idle_limit_s)):
        if seconds > 0:
            getattr(result, name).CopyFrom(duration(seconds))
    if job.grant_time is not None:
        result.grant_time.FromDatetime(job.grant_time)
    result.slots.extend(map(write_slot, job.slots))
    if job.start_time is not None:
        result.start_time.FromDatetime(job.start_time)
    if job.end_time is not None:
        result.end_time.FromDatetime(job.end_time)
    if job.error is not None:
        result.error.CopyFrom(encode(status_of(job.error)))
    return result


def _write_cost(job: Job, prices: Prices) -> job_pb2.JobCost:
    hourly = prices.of(used(job.cost, HOUR_S))
    result = job_pb2.JobCost(slots=job.cost.slots, gpus=job.cost.gpus, hourly_price=hourly)
    if job.max_duration_s > 0:
        at_most = used(job.cost, job.max_duration_s)
        result.max_slot_hours = at_most.slot_seconds / HOUR_S
        result.max_gpu_hours = at_most.gpu_seconds / HOUR_S
        if (price := prices.of(at_most)) is not None:
            result.max_price = price
    return result


def write_slot(spec: SlotSpec) -> job_pb2.SlotSpec:
    return job_pb2.SlotSpec(
        role=ROLE_OUT[spec.role],
        base_model=spec.base_model,
        tuning=_TUNING_OUT[spec.tuning],
        count=spec.count,
        options=write_options(spec.options, exclusive=spec.exclusive),
    )


def status_of(failure: Failure) -> StatusData:
    # A driver's own failure has words but no reason of the catalogue.
    code = CATALOGUE[Reason(failure.reason)].code if failure.reason else grpc.StatusCode.ABORTED
    return StatusData(code=code, message=failure.message, reason=failure.reason, metadata=failure.metadata)


def write_endpoint(endpoint: JobEndpoint) -> job_pb2.Endpoint:
    return job_pb2.Endpoint(
        role=ROLE_OUT[endpoint.role],
        server=endpoint.server,
        address=endpoint.address,
        attempt=endpoint.attempt,
        base_model=endpoint.base_model,
        slot_index=endpoint.slot_index,
    )


def write_server(
    server: Server, used: int, load: Load | None, expires: datetime | None, *, details: bool = True
) -> job_pb2.Server:
    """`details`: with what is of use on its machine only, to who runs the cluster."""
    options = server.reported if server.reported != ServerOptions() else server.options
    result = job_pb2.Server(
        name=server.name,
        role=ROLE_OUT[server.role],
        base_model=server.base_model,
        options=write_options(options),
        address=server.address,
        state=SERVER_STATES[server.state],
        slots_total=server.slots_total,
        slots_used=used,
        attempt=server.attempt,
        start_time=timestamp(server.start_time),
        pid=server.pid if details else 0,
        log_path=server.log_path if details else "",
        launcher=server.launcher,
        devices=server.devices if details else (),
    )
    if expires is not None:
        result.expire_time.FromDatetime(expires)
    if load is not None:
        result.load.running_requests = load.running_requests
        result.load.queued_requests = load.queued_requests
        result.load.memory_bytes = load.memory_bytes
    return result


def read_registration(request: registry_pb2.RegisterServerRequest) -> Registration:
    return Registration(
        instance_id=request.instance_id,
        server_id=request.server_id,
        role=read_enum(ROLES, request.role, "role", "slot role"),
        base_model=request.base_model,
        base_digest=request.base_digest,
        options=read_options(request.options),
        slots=request.slots,
        address=request.advertise_address,
        pid=request.pid,
        ready=request.ready,
    )


def read_load(load: job_pb2.ServerLoad) -> Load:
    return Load(load.running_requests, load.queued_requests, load.memory_bytes)


def read_tokens(count: job_pb2.TokenCount) -> TokenCount:
    return TokenCount(count.job.removeprefix("jobs/"), count.trained, count.sampled)


def write_down(message: sessions.Down) -> registry_pb2.ServerSessionResponse:
    """One message down a session."""
    result = registry_pb2.ServerSessionResponse()
    match message:
        case sessions.Lease(ttl_s):
            result.lease.ttl.CopyFrom(duration(ttl_s))
        case sessions.Assign(assignment, policies):
            result.assignment.assignment = assignment.id
            result.assignment.job = f"jobs/{assignment.job_id}"
            result.assignment.attempt = assignment.attempt
            result.assignment.policies.extend(policies)
        case sessions.Release(assignment):
            result.release.assignment = assignment.id
            result.release.job = f"jobs/{assignment.job_id}"
        case sessions.Drain(reason):
            result.drain.reason = reason
    return result
