"""Which servers serve what, and what a deployment remembers: rules without a database."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain import deployments as rules
from opentinker_scheduler.domain.deployments import DeploymentState
from opentinker_scheduler.domain.model import (
    Failure,
    Job,
    JobKind,
    JobState,
    Role,
    ServerOptions,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.domain.records import Deployment, Policy, Target
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LORA = Policy(
    id="p",
    project="default",
    job_id="j",
    base_model="m",
    base_digest="",
    tuning=Tuning.LORA,
    rank=16,
    alpha=None,
    target_modules=(),
    seed=0,
    display_name="",
    latest_version=1,
    create_time=NOW,
)
FULL = replace(LORA, tuning=Tuning.FULL, rank=0)


def target(policy: Policy | None) -> Target:
    return Target("policies/p/versions/1", "m", policy, 1) if policy else Target("models/m", "m")


def job(state: JobState = JobState.RUNNING, *slots: SlotSpec) -> Job:
    return Job("j", "default", JobKind.LORA_RL, slots, state, NOW, NOW)


def deployment(model: str = "models/m", *history: str) -> Deployment:
    return Deployment("d", "default", model, SlotSpec(Role.INFERENCE, "m"), "j", NOW, NOW, history)


def test_servers_are_asked_for_as_the_weights_need_them() -> None:
    slot = rules.slot_for(target(LORA), None, ServerOptions())
    assert (slot.role, slot.options.max_lora_rank, slot.exclusive) == (Role.INFERENCE, 32, False)
    assert rules.slot_for(target(replace(LORA, rank=64)), None, ServerOptions()).options.max_lora_rank == 64
    whole = rules.slot_for(target(FULL), None, ServerOptions())
    assert (whole.options.serving_mode, whole.exclusive) == ("merged", True)
    assert rules.slot_for(target(None), None, ServerOptions(), 3) == SlotSpec(Role.INFERENCE, "m", count=3)


def test_servers_are_like_those_the_policy_was_sampled_from() -> None:
    """But for what is asked for, and for a job that sampled from another base (a teacher), or from none."""
    options = ServerOptions(engine="vllm", serving_mode="merged", context_tokens=512)
    sampled = SlotSpec(Role.INFERENCE, "m", options=options, count=2)
    own = job(JobState.SUCCEEDED, SlotSpec(Role.TRAINER, "m"), sampled)
    slot = rules.slot_for(target(LORA), own, ServerOptions(context_tokens=1024))
    assert slot.options == replace(options, context_tokens=1024)
    assert slot.count == 1
    other = job(JobState.SUCCEEDED, replace(sampled, base_model="other"))
    assert rules.slot_for(target(LORA), other, ServerOptions()).options.engine == ""


@pytest.mark.parametrize(
    ("policy", "base", "options", "word"),
    [
        (LORA, "other", ServerOptions(), "other"),
        (replace(LORA, rank=33), "m", ServerOptions(max_lora_rank=32), "rank 33"),
        (FULL, "m", ServerOptions(serving_mode="adapter"), "whole model"),
    ],
)
def test_what_does_not_fit_is_named(policy: Policy, base: str, options: ServerOptions, word: str) -> None:
    slot = SlotSpec(Role.INFERENCE, "m", options=options)
    with pytest.raises(ServiceError, match=word) as refused:
        rules.check_fits(target(policy), base, slot, "deployments/d")
    assert refused.value.reason is Reason.UNSUPPORTED_COMBINATION


@pytest.mark.parametrize("policy", [LORA, FULL, None])
def test_what_fits_passes(policy: Policy | None) -> None:
    for options in (ServerOptions(), ServerOptions(serving_mode="merged", max_lora_rank=16)):
        rules.check_fits(target(policy), "m", SlotSpec(Role.INFERENCE, "m", options=options), "d")


def test_history_is_a_stack_with_a_bottom() -> None:
    made = deployment()
    for number in range(rules.MAX_HISTORY + 10):
        made = rules.promoted(made, f"policies/p/versions/{number}", NOW)
    assert len(made.history) == rules.MAX_HISTORY
    assert rules.promoted(made, made.model, NOW) is made
    back = rules.rolled_back(made, NOW)
    assert (back.model, back.history) == (made.history[0], made.history[1:])
    with pytest.raises(ServiceError, match="nothing to go back to"):
        rules.rolled_back(deployment(), NOW)


def test_a_deployment_stands_where_its_job_does() -> None:
    want = {
        JobState.RUNNING: DeploymentState.SERVING,
        JobState.PAUSED: DeploymentState.PAUSED,
        **dict.fromkeys((JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED), DeploymentState.FAILED),
    }
    for state in JobState:
        assert rules.state_of(job(state)) is want.get(state, DeploymentState.STARTING), state
    assert rules.state_of(None) is DeploymentState.FAILED
    assert rules.why(None)
    assert rules.why(job(JobState.SUCCEEDED)) == "jobs/j was SUCCEEDED"
    assert rules.why(replace(job(JobState.FAILED), error=Failure("", "it burnt"))) == "it burnt"
    assert rules.why(job()) == ""
