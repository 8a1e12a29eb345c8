"""What may be served under which name, and where that stands: rules over records, no storage."""

from dataclasses import replace
from datetime import datetime
from enum import StrEnum

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.model import Job, JobState, Role, ServerOptions, SlotSpec, Tuning
from opentinker_scheduler.domain.names import valid_id
from opentinker_scheduler.domain.records import Deployment, Policy, Target
from opentinkerapi.runtime.reasons import Reason

BASE = "models/"
"""What names of base models begin with; the rest may be any text, a directory too."""
MAX_HISTORY = 50
MIN_RANK = 32
"""Servers are asked to take at least this rank, as by clients: so that equal wishes share servers."""


class DeploymentState(StrEnum):
    """Where a deployment stands; it follows its job."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    FAILED = "failed"


def state_of(job: Job | None) -> DeploymentState:
    """The state of a deployment whose job this is."""
    if job is None or job.state.final:
        return DeploymentState.FAILED
    if job.state is JobState.RUNNING:
        return DeploymentState.SERVING
    return DeploymentState.PAUSED if job.state is JobState.PAUSED else DeploymentState.STARTING


def why(job: Job | None) -> str:
    """What a deployment that does not serve waits for, or what became of its job; nothing where it serves."""
    if job is None:
        return "its job is gone"
    if job.error is not None:
        return job.error.message
    ended = f"{job.name} was {job.state.upper()}" if job.state.final else ""
    return job.state_reason or job.outcome_message or ended


def check_id(deployment_id: str) -> None:
    """INVALID_FIELD unless a user may choose this id."""
    if not valid_id(deployment_id):
        text = (
            f"{deployment_id!r} is no deployment id: at most 63 lower-case letters, digits and hyphens, "
            "beginning with a letter or digit"
        )
        raise ServiceError(Reason.INVALID_FIELD, text, field="deployment_id")


def slot_for(target: Target, own_job: Job | None, asked: ServerOptions, replicas: int = 1) -> SlotSpec:
    """An inference slot that serves a target, like those its policy was sampled from where nothing else is
    asked for: a server that is loaded is then used at once.
    """
    sampled = _sampled_from(target, own_job)
    options, exclusive = ServerOptions(), False
    if sampled is not None:
        options, exclusive = sampled.options, sampled.exclusive
    elif target.policy is not None:
        options, exclusive = _fitting(target.policy)
    given = {name: value for name in asked.__slots__ if (value := getattr(asked, name))}
    return SlotSpec(
        role=Role.INFERENCE,
        base_model=target.base_model,
        count=replicas,
        options=replace(options, **given),
        exclusive=exclusive,
    )


def check_fits(target: Target, base_model: str, slot: SlotSpec, name: str) -> None:
    """UNSUPPORTED_COMBINATION where the servers of a deployment cannot serve a target."""
    policy, options = target.policy, slot.options
    text = ""
    if base_model != slot.base_model:
        text = f"{target.model} is over {base_model}, and {name} serves {slot.base_model}"
    elif policy is not None and policy.tuning is Tuning.FULL and options.serving_mode == "adapter":
        text = f"{target.model} is a whole model, and the servers of {name} serve adapters"
    elif policy is not None and 0 < options.max_lora_rank < policy.rank:
        text = f"{target.model} has rank {policy.rank}, and {name} was made for {options.max_lora_rank}"
    if text:
        way_out = "make another deployment for it"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, f"{text}; {way_out}", field="model")


def promoted(deployment: Deployment, model: str, now: datetime) -> Deployment:
    """Serving another model; what was served before comes first in its history."""
    if model == deployment.model:
        return deployment
    history = (deployment.model, *deployment.history)[:MAX_HISTORY]
    return replace(deployment, model=model, history=history, update_time=now)


def rolled_back(deployment: Deployment, now: datetime) -> Deployment:
    """Serving what was served before. INVALID_STATE where there was nothing."""
    if not deployment.history:
        text = f"{deployment.name} has served nothing but {deployment.model}: there is nothing to go back to"
        raise ServiceError(Reason.INVALID_STATE, text)
    first, *rest = deployment.history
    return replace(deployment, model=first, history=tuple(rest), update_time=now)


def _sampled_from(target: Target, own_job: Job | None) -> SlotSpec | None:
    """The slot that the policy's own job samples from."""
    if target.policy is None or own_job is None:
        return None
    slots = (spec for spec in own_job.slots if spec.role is Role.INFERENCE)
    return next((spec for spec in slots if spec.base_model == target.base_model), None)


def _fitting(policy: Policy) -> tuple[ServerOptions, bool]:
    if policy.tuning is Tuning.FULL:
        return ServerOptions(serving_mode="merged"), True
    return ServerOptions(max_lora_rank=max(MIN_RANK, policy.rank)), False
