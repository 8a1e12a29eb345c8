"""Deployments and resolved names as messages."""

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.deployments import NewDeployment, Seen
from opentinker_scheduler.application.resolution import Resolved
from opentinker_scheduler.domain.deployments import BASE, DeploymentState, state_of, why
from opentinker_scheduler.domain.records import Target
from opentinker_scheduler.wire.jobs import (
    read_options,
    status_of,
    timestamp,
    write_endpoint,
    write_options,
    write_slot,
)
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import deployment_pb2
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import encode

_STATES = {
    DeploymentState.STARTING: deployment_pb2.DEPLOYMENT_STATE_STARTING,
    DeploymentState.SERVING: deployment_pb2.DEPLOYMENT_STATE_SERVING,
    DeploymentState.PAUSED: deployment_pb2.DEPLOYMENT_STATE_PAUSED,
    DeploymentState.FAILED: deployment_pb2.DEPLOYMENT_STATE_FAILED,
}


def read_deployment(deployment_id: str, asked: deployment_pb2.Deployment) -> NewDeployment:
    replicas = asked.replicas if asked.HasField("replicas") else 1
    if replicas < 1:
        text = "replicas must be at least 1"
        raise ServiceError(Reason.INVALID_FIELD, text, field="deployment.replicas")
    options = read_options(asked.options)
    return NewDeployment(deployment_id, asked.model, replicas, options, asked.options.exclusive)


def write_deployment(seen: Seen) -> deployment_pb2.Deployment:
    deployment, job = seen.deployment, seen.job
    result = deployment_pb2.Deployment(
        name=deployment.name,
        model=deployment.model,
        replicas=deployment.slot.count,
        options=write_options(deployment.slot.options, exclusive=deployment.slot.exclusive),
        base_model=deployment.slot.base_model,
        state=_STATES[state_of(job)],
        state_reason=why(job),
        job=f"jobs/{deployment.job_id}",
        previous_models=deployment.history,
        create_time=timestamp(deployment.create_time),
        update_time=timestamp(deployment.update_time),
        project=deployment.project,
    )
    if job is not None and job.error is not None:
        result.error.CopyFrom(encode(status_of(job.error)))
    return result


def write_resolved(resolved: Resolved, job_token: str) -> pb.ResolveModelResponse:
    return pb.ResolveModelResponse(
        model=resolved.target.model,
        model_ref=_model_ref(resolved.target),
        base_model=resolved.target.base_model,
        deployment=resolved.deployment,
        endpoints=map(write_endpoint, resolved.endpoints),
        job=resolved.job.name if resolved.job is not None else "",
        job_token=job_token,
        slot=write_slot(resolved.slot),
        state_reason=resolved.state_reason,
    )


def _model_ref(target: Target) -> sampling_pb2.ModelRef:
    if target.policy is None:
        return sampling_pb2.ModelRef(base_model=target.model.removeprefix(BASE))
    if target.version is None:
        return sampling_pb2.ModelRef(checkpoint=target.model)
    version = sampling_pb2.PolicyVersionRef(policy=target.policy.name, version=target.version)
    return sampling_pb2.ModelRef(policy_version=version)
