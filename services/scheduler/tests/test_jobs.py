"""The life of a job: legal steps, attempts, crashes."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import (
    Failure,
    Job,
    JobKind,
    JobState,
    OnClientLoss,
    Role,
    SlotSpec,
)
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BUDGET = rules.CrashBudget(limit=3, window=timedelta(minutes=10))
CRASH = Failure(Reason.LAUNCH_FAILED, "trainer server servers/x (m) exited with code 1; its log ends:\nboom")


def job(state: JobState = JobState.QUEUED, **more: object) -> Job:
    slots = (SlotSpec(Role.TRAINER, "m"),)
    return Job("j", "default", JobKind.LORA_RL, slots, state, NOW, NOW, **more)  # type: ignore[arg-type]


def test_the_usual_life() -> None:
    it = rules.granted(job())
    assert (it.state, it.attempt) == (JobState.STARTING, 1)
    it = rules.running(it, NOW)
    assert it.start_time == NOW
    it = rules.finished(it, JobState.SUCCEEDED, "done", NOW)
    assert (it.state, it.outcome_message, it.end_time, it.error) == (JobState.SUCCEEDED, "done", NOW, None)


def test_a_failure_named_by_its_driver_is_kept() -> None:
    it = rules.finished(job(JobState.RUNNING), JobState.FAILED, "loss is NaN", NOW)
    assert it.error == Failure("", "loss is NaN")


@pytest.mark.parametrize("state", [state for state in JobState if state.final])
def test_final_is_final(state: JobState) -> None:
    for step in (
        lambda it: rules.cancelled(it, "", NOW),
        lambda it: rules.paused(it, ""),
        lambda it: rules.resumed(it, NOW),
        lambda it: rules.finished(it, JobState.FAILED, "", NOW),
    ):
        with pytest.raises(ServiceError) as refused:
            step(job(state))
        assert refused.value.reason is Reason.INVALID_STATE
        assert state.upper() in refused.value.message


def test_a_queued_job_cannot_have_succeeded() -> None:
    with pytest.raises(ServiceError, match="INVALID_STATE"):
        rules.finished(job(), JobState.SUCCEEDED, "", NOW)


def test_each_crash_fences_and_the_last_one_fails() -> None:
    it = rules.running(rules.granted(job()), NOW)
    for number in (1, 2):
        it = rules.lost_server(it, CRASH, NOW + timedelta(seconds=number), BUDGET)
        assert (it.state, it.attempt) == (JobState.STARTING, 1 + number)
        assert "exited with code 1" in it.state_reason
        assert "boom" not in it.state_reason
        # Its slots come back under the attempt that the loss made.
        assert rules.granted(it).attempt == it.attempt
    it = rules.lost_server(it, CRASH, NOW + timedelta(seconds=3), BUDGET)
    assert it.state is JobState.FAILED
    assert it.error is not None
    assert it.error.reason == Reason.LAUNCH_FAILED
    assert "boom" in it.error.message
    assert "crash 3 of 3" in it.error.message


def test_progress_and_time_forgive_crashes() -> None:
    it = job(JobState.RUNNING, crashes=(NOW, NOW))
    assert rules.lost_server(rules.progressed(it, NOW), CRASH, NOW, BUDGET).state is JobState.STARTING
    later = NOW + timedelta(minutes=11)
    assert rules.lost_server(it, CRASH, later, BUDGET).crashes == (later,)


def test_a_stop_of_ours_is_no_crash() -> None:
    it = job(JobState.RUNNING, crashes=(NOW, NOW))
    after = rules.lost_server(it, CRASH, NOW, BUDGET, counts=False)
    assert (after.state, after.crashes) == (JobState.STARTING, (NOW, NOW))


def test_a_lost_replica_fails_no_job_and_is_not_replaced_for_ever() -> None:
    it = rules.running(rules.granted(job()), NOW)
    for number in (1, 2, 3):
        assert rules.gives_up(it, NOW, BUDGET) == ""
        it = rules.lost_replica(it, CRASH, NOW, BUDGET)
        assert (it.state, it.attempt, len(it.crashes)) == (JobState.RUNNING, 1 + number, number)
        assert "exited with code 1" in it.state_reason
        # Its place on a new server comes under the attempt that the loss made.
        assert rules.granted(it) == it
    assert "3 crashes" in rules.gives_up(it, NOW, BUDGET)
    assert rules.gives_up(it, NOW + timedelta(minutes=11), BUDGET) == ""
    # The last one takes the job along.
    assert rules.lost_server(it, CRASH, NOW, BUDGET).state is JobState.FAILED
    assert rules.running(it, NOW).state_reason == ""


@pytest.mark.parametrize(
    ("wish", "state"), [(OnClientLoss.PAUSE, JobState.PAUSED), (OnClientLoss.CANCEL, JobState.CANCELLED)]
)
@pytest.mark.parametrize("at", [JobState.QUEUED, JobState.STARTING, JobState.RUNNING])
def test_a_lost_client(wish: OnClientLoss, state: JobState, at: JobState) -> None:
    after = rules.client_lost(job(at, on_client_loss=wish, lease_ttl_s=42.0), NOW)
    assert after.state is state
    assert "42 s" in after.state_reason


def test_a_paused_job_goes_to_the_end_of_the_queue() -> None:
    later = NOW + timedelta(hours=1)
    after = rules.resumed(rules.paused(job(JobState.RUNNING, attempt=4), "why"), later)
    assert (after.state, after.queue_time, after.create_time) == (JobState.QUEUED, later, NOW)
    assert rules.granted(after).attempt == 5


def test_the_time_that_slots_were_held_is_counted() -> None:
    queued = job(max_duration_s=100.0)
    it, seconds = rules.timed(queued, rules.granted(queued), NOW)
    assert (it.grant_time, seconds) == (NOW, 0.0)
    later = NOW + timedelta(seconds=30)
    assert rules.timed(it, rules.running(it, later), later) == (rules.running(it, later), 0.0)
    paused, seconds = rules.timed(it, rules.paused(it, ""), later)
    assert (paused.grant_time, paused.held_s, seconds) == (None, 30.0, 30.0)
    # Paused, it holds nothing; resumed, what is left of its time goes on.
    assert rules.overran(paused, NOW + timedelta(days=9)) is None
    again, _ = rules.timed(paused, rules.granted(rules.resumed(paused, later)), later)
    assert rules.overran(again, later + timedelta(seconds=69)) is None
    why = rules.overran(again, later + timedelta(seconds=70))
    assert why is not None
    assert why.reason == Reason.TIME_LIMIT
    ended = rules.expired(again, why, later)
    assert (ended.state, ended.error) == (JobState.FAILED, why)


def test_a_clock_that_was_set_back_takes_no_time_away() -> None:
    it, _ = rules.timed(job(), rules.granted(job()), NOW)
    paused, seconds = rules.timed(it, rules.paused(it, ""), NOW - timedelta(hours=1))
    assert (paused.held_s, seconds) == (0.0, 0.0)


def test_a_job_without_progress_is_idle() -> None:
    it = rules.running(rules.granted(job(idle_limit_s=60.0)), NOW)
    assert rules.overran(it, NOW + timedelta(seconds=59)) is None
    why = rules.overran(it, NOW + timedelta(seconds=60))
    assert why is not None
    assert why.reason == Reason.IDLE_LIMIT
    it = rules.progressed(it, NOW + timedelta(seconds=50))
    assert rules.overran(it, NOW + timedelta(seconds=109)) is None
    # While it waits for a server it is not idle, and begins anew when it runs again.
    restarted = rules.lost_server(it, CRASH, NOW, BUDGET)
    assert rules.overran(restarted, NOW + timedelta(days=1)) is None
    later = NOW + timedelta(days=1)
    assert rules.overran(rules.running(restarted, later), later + timedelta(seconds=59)) is None


def test_who_gave_way_keeps_its_place_and_its_client() -> None:
    it = rules.running(rules.granted(job(attempt=4)), NOW)
    away = rules.preempted(it)
    assert (away.state, away.queue_time) == (JobState.PREEMPTED, NOW)
    assert "higher priority" in away.state_reason
    again = rules.requeued(away)
    assert (again.state, again.queue_time) == (JobState.QUEUED, NOW)
    assert rules.granted(again).attempt == 6
    # Whatever comes meanwhile finds a job that can be ended or paused.
    assert rules.client_lost(away, NOW).state is JobState.PAUSED
    assert rules.finished(away, JobState.SUCCEEDED, "", NOW).state is JobState.SUCCEEDED
    assert rules.cancelled(away, "", NOW).state is JobState.CANCELLED


STEPS = st.lists(
    st.sampled_from(
        [
            "grant",
            "run",
            "crash",
            "replica",
            "preempt",
            "requeue",
            "pause",
            "resume",
            "lose",
            "cancel",
            "succeed",
            "fail",
        ]
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, cancel_on_loss=st.booleans())
def test_whatever_happens_states_follow_the_table_and_attempts_never_fall(
    steps: list[str], cancel_on_loss: bool
) -> None:
    wish = OnClientLoss.CANCEL if cancel_on_loss else OnClientLoss.PAUSE
    it = job(on_client_loss=wish)
    for step in steps:
        if step == "replica" and it.state is not JobState.RUNNING:
            continue
        try:
            after = {
                "grant": lambda it=it: rules.granted(it),
                "run": lambda it=it: rules.running(it, NOW),
                "crash": lambda it=it: rules.lost_server(it, CRASH, NOW, BUDGET),
                "replica": lambda it=it: rules.lost_replica(it, CRASH, NOW, BUDGET),
                "preempt": lambda it=it: rules.preempted(it),
                "requeue": lambda it=it: rules.requeued(it),
                "pause": lambda it=it: rules.paused(it, ""),
                "resume": lambda it=it: rules.resumed(it, NOW),
                "lose": lambda it=it: rules.client_lost(it, NOW),
                "cancel": lambda it=it: rules.cancelled(it, "", NOW),
                "succeed": lambda it=it: rules.finished(it, JobState.SUCCEEDED, "", NOW),
                "fail": lambda it=it: rules.finished(it, JobState.FAILED, "", NOW),
            }[step]()
        except ServiceError:
            continue
        assert after.state in rules.SUCCESSORS[it.state]
        assert after.attempt >= it.attempt
        assert (after.end_time is not None) == after.state.final
        if step in ("crash", "replica") and not after.state.final:
            assert after.attempt > it.attempt
        it = after
