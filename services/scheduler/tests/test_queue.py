"""Priorities, quotas, limits and reservations through the whole service."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from services.scheduler.tests.asking import cancel, refused, says
from services.scheduler.tests.projects import Projects, create_for

from opentinker_kit.clock import ManualClock
from opentinker_kit.settings import read_secret
from opentinker_kit.testing import wait_until
from opentinker_scheduler.application import estimating, usage
from opentinker_scheduler.bootstrap import access_table
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.runtime.errors import QuotaExceeded, from_status_data
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import decode
from opentinkerapi.scheduler.v1 import account_service_pb2 as accounts_pb
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1.account_service_pb2_grpc import AccountServiceStub

QUEUED, RUNNING, FAILED = (
    job_pb2.JOB_STATE_QUEUED,
    job_pb2.JOB_STATE_RUNNING,
    job_pb2.JOB_STATE_FAILED,
)


async def test_who_is_urgent_goes_first(start_rig: Any) -> None:
    rig = await start_rig(max_servers=1, trainer_slots=1, default_tenant={"max_priority": 5})
    first = await rig.create_job()
    await rig.until(first.name, RUNNING)
    jobs = [await rig.create_job(priority=priority) for priority in (-3, 0, 5)]
    assert [job.priority for job in jobs] == [-3, 0, 5]
    for job, position in zip(jobs, (3, 2, 1), strict=True):
        await wait_until(lambda job=job, at=position: _position(rig, job, at), what=f"{position}")
    await cancel(rig, first)
    for job in reversed(jobs):
        await rig.until(job.name, RUNNING)
        await cancel(rig, job)


async def _position(rig: Any, job: job_pb2.Job, position: int) -> bool:
    return (await rig.job(job.name)).queue_position == position


async def test_a_quota_makes_wait_and_is_named(start_rig: Any, make_slot: Any, make_job: Any) -> None:
    rig = await start_rig(default_tenant={"max_slots": 3, "max_jobs": 3})
    first = await rig.create_job(make_slot(count=2))
    await rig.until(first.name, RUNNING)
    second = await rig.create_job(make_slot(count=2))
    await says(rig, second, "project default holds 2 of its quota max_slots=3", "takes 2 more")
    small = await rig.create_job()
    await rig.until(small.name, RUNNING)
    error = await refused(rig.create_job())
    assert isinstance(error, QuotaExceeded)
    assert "max_jobs is 3" in error.message
    await cancel(rig, first)
    await rig.until(second.name, RUNNING)
    error = await refused(rig.create_job(make_slot(count=4)))
    assert "max_slots of project default is 3" in error.message
    assert error.violations[0][0] == "job.slots"
    error = await refused(rig.create_job(priority=1))
    assert "max_priority of project default is 0" in error.message


async def test_gpu_seconds_of_a_day(start_rig: Any) -> None:
    clock = ManualClock()
    tenant = {"max_gpu_seconds_a_day": 100.0}
    settings = {"default_tenant": tenant, "engine_gpus": {"noop": 4}, "trainer_slots": 8}
    # A shared slot counts as half a GPU of its server's four.
    rig = await start_rig({"clock": clock}, **settings)
    first = await rig.create_job()
    await rig.until(first.name, RUNNING)
    await clock.advance(199.0)
    second = await rig.create_job()
    await rig.until(second.name, RUNNING)
    await cancel(rig, first)
    await clock.advance(3.0)
    third = await rig.create_job()
    await says(rig, third, "project default used", "max_gpu_seconds_a_day=100", "00:00 UTC")
    # Who runs goes on; with the next day the others start.
    assert (await rig.job(second.name)).state == RUNNING
    await clock.advance(86400.0 - 202.0)
    await rig.renew(third.name)
    await rig.until(third.name, RUNNING)
    job = await rig.job(first.name)
    assert job.held_duration.seconds == 199
    assert not job.HasField("grant_time")


async def test_tokens_of_a_day(start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_EVERY_S", 0.1)
    clock = ManualClock()
    rig = await start_rig({"clock": clock}, "trains:600", default_tenant={"max_tokens_a_day": 1000})
    first = await rig.create_job()
    await rig.until(first.name, RUNNING)
    second = await rig.create_job()
    # Below the quota the next one still starts, and what runs goes on over it.
    await rig.until(second.name, RUNNING)
    await wait_until(lambda: _tokens(rig, 1200), what="both are counted")
    third = await rig.create_job()
    await says(rig, third, "waiting for its quota: project default used 1200 tokens", "max_tokens_a_day=1000")
    await says(rig, third, "00:00 UTC")
    assert (await rig.job(third.name)).state == QUEUED
    assert [(await rig.job(job.name)).state for job in (first, second)] == [RUNNING, RUNNING]
    await clock.advance(86400.0)
    for job in (first, second, third):
        await rig.renew(job.name)
    await rig.until(third.name, RUNNING)


async def _tokens(rig: Any, number: int) -> bool:
    answer = await AccountServiceStub(rig.channel()).ListUsage(accounts_pb.ListUsageRequest())
    return sum(row.tokens_trained for row in answer.usage) == number


async def test_a_waiting_job_says_when_it_is_expected_to_start(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimating, "_RECENT_S", 0.0)
    rig = await start_rig(max_servers=1, trainer_slots=1)
    first = await rig.create_job(max_duration=Duration(seconds=3600))
    first = await rig.until(first.name, RUNNING)
    assert not first.HasField("estimated_start_time")
    second, third = await rig.create_job(), await rig.create_job()
    at_the_latest = first.grant_time.seconds + 3600
    await wait_until(lambda: _expects(rig, second, at_the_latest), what="it starts when the first must end")
    # The second has no limit, and nothing is known of such jobs.
    await says(rig, third, "1 job ahead")
    assert not (await rig.job(third.name)).HasField("estimated_start_time")
    await cancel(rig, first)
    second = await rig.until(second.name, RUNNING)
    assert not second.HasField("estimated_start_time")
    await cancel(rig, second)
    third = await rig.until(third.name, RUNNING)
    # Five that ended say how long a sixth will take.
    waiting = third
    for _ in range(4):
        last, waiting = waiting, await rig.create_job()
        await cancel(rig, last)
        waiting = await rig.until(waiting.name, RUNNING)
    await cancel(rig, waiting)
    longer = await rig.create_job(max_duration=Duration(seconds=1800))
    longer = await rig.until(longer.name, RUNNING)
    one, two = await rig.create_job(), await rig.create_job()
    await wait_until(lambda: _expects(rig, one, longer.grant_time.seconds + 1800), 30, what="by its limit")
    # The second of them waits for the first too, which will take as long as those before.
    await wait_until(lambda: _expects(rig, two, longer.grant_time.seconds + 1800), what="by the past")


async def _expects(rig: Any, job: job_pb2.Job, seconds: int) -> bool:
    job = await rig.job(job.name)
    return job.HasField("estimated_start_time") and abs(job.estimated_start_time.seconds - seconds) < 60


async def test_what_a_job_takes_and_costs(start_rig: Any, make_slot: Any) -> None:
    clock = ManualClock()
    settings: dict[str, Any] = {"engine_gpus": {"noop": 4}, "trainer_slots": 8}
    rig = await start_rig({"clock": clock}, **settings, price_per_gpu_hour=3.0, price_per_slot_hour=0.5)
    job = await rig.create_job(make_slot(count=2), max_duration=Duration(seconds=5400))
    assert (job.cost.slots, job.cost.gpus) == (2.0, 1.0)
    assert (job.cost.max_slot_hours, job.cost.max_gpu_hours) == (3.0, 1.5)
    assert (job.cost.hourly_price, job.cost.max_price) == (4.0, 6.0)
    unlimited = (await rig.create_job()).cost
    assert unlimited.hourly_price == 2.0
    assert [unlimited.HasField(name) for name in ("max_slot_hours", "max_gpu_hours", "max_price")] == [
        False
    ] * 3
    await rig.until(job.name, RUNNING)
    await clock.advance(1800.0)
    await cancel(rig, job)
    asked = accounts_pb.ListUsageRequest(group=accounts_pb.USAGE_GROUP_JOB)
    rows = {row.job: row for row in (await AccountServiceStub(rig.channel()).ListUsage(asked)).usage}
    assert rows[job.name].price == pytest.approx(2.0, rel=0.05)


async def test_without_prices_no_money_is_shown(rig: Any) -> None:
    job = await rig.create_job(max_duration=Duration(seconds=3600))
    assert (job.cost.slots, job.cost.max_slot_hours) == (1.0, 1.0)
    assert not any(job.cost.HasField(name) for name in ("hourly_price", "max_price"))
    await rig.until(job.name, RUNNING)
    (row,) = (await AccountServiceStub(rig.channel()).ListUsage(accounts_pb.ListUsageRequest())).usage
    assert not row.HasField("price")


async def test_a_time_limit_ends_a_job_and_frees_its_slots(start_rig: Any, make_job: Any) -> None:
    rig = await start_rig(max_servers=1, trainer_slots=1)
    job = await rig.create_job(max_duration=Duration(seconds=1))
    waiting = await rig.create_job()
    ended = await rig.until(job.name, FAILED)
    error = from_status_data(decode(ended.error))
    assert error.reason == Reason.TIME_LIMIT
    assert isinstance(error, TimeoutError)
    assert "max_duration is 1 s" in ended.error.message
    assert ended.held_duration.ToTimedelta().total_seconds() >= 1
    await rig.until(waiting.name, RUNNING)
    error = await refused(rig.create_job(max_duration=Duration(seconds=-5)))
    assert (error.reason, error.violations[0][0]) == (Reason.INVALID_FIELD, "job.max_duration")


async def test_the_cluster_has_a_time_limit_for_those_who_name_none(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(behavior="silent", job_max_duration_s=3600.0)
    assert (await rig.create_job()).max_duration.seconds == 3600
    assert (await rig.create_job(max_duration=Duration(seconds=7200))).max_duration.seconds == 7200
    detached = await rig.create_job(
        make_slot(job_pb2.SLOT_ROLE_INFERENCE),
        kind=job_pb2.JOB_KIND_INFERENCE,
        on_client_loss=job_pb2.ON_CLIENT_LOSS_DETACH,
    )
    assert not detached.HasField("max_duration")


async def test_a_job_that_makes_no_progress_ends(start_rig: Any) -> None:
    clock = ManualClock()
    rig = await start_rig({"clock": clock})
    idle = await rig.create_job(idle_limit=Duration(seconds=60))
    busy = await rig.create_job(idle_limit=Duration(seconds=60))
    for job in (idle, busy):
        await rig.until(job.name, RUNNING)
    made = await rig.runs.CreateRun(
        run_service_pb2.CreateRunRequest(request_id="run", run=run_pb2.Run(job=busy.name))
    )
    await clock.advance(45.0)
    row = run_pb2.MetricsRow(step=1, values={"reward": 0.5})
    await rig.runs.AppendMetrics(run_service_pb2.AppendMetricsRequest(run=made.run.name, rows=[row]))
    await clock.advance(20.0)
    ended = await rig.until(idle.name, FAILED)
    assert decode(ended.error).reason == Reason.IDLE_LIMIT
    assert "idle_limit is 60 s" in ended.error.message
    assert (await rig.job(busy.name)).state == RUNNING


async def test_slots_are_kept_for_a_large_job(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(max_servers=1, trainer_slots=4, reserve_after_s=2.0)
    first = await rig.create_job()
    await rig.until(first.name, RUNNING)
    large = await rig.create_job(make_slot(count=4))
    # While it has just come nobody waits for it; then what gets free is kept.
    early = await rig.create_job()
    await rig.until(early.name, RUNNING)
    await says(rig, large, "waiting for 4 trainer slots", "slots are kept for it")
    small = await rig.create_job()
    await says(rig, small, "what is free is kept for a job that waits for more")
    for job in (first, early):
        await cancel(rig, job)
    await rig.until(large.name, RUNNING)
    assert (await rig.job(small.name)).state == QUEUED
    await cancel(rig, large)
    await rig.until(small.name, RUNNING)


async def test_a_job_gives_way_and_goes_on_where_it_was(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(
        max_servers=1,
        trainer_slots=2,
        default_tenant={"max_priority": 1},
        preemption=True,
        preempt_after_s=0.0,
    )
    humble = await rig.create_job(make_slot(count=2))
    await rig.until(humble.name, RUNNING)
    equal = await rig.create_job()
    urgent = await rig.create_job(priority=1)
    await rig.until(urgent.name, RUNNING)
    # The other slot of the server is for whoever is first; the one that gave way keeps its old place.
    seen = await rig.job(humble.name)
    assert seen.state in (job_pb2.JOB_STATE_PREEMPTED, QUEUED)
    assert "release" in str(rig.told((await rig.servers())[0]))
    await rig.until(equal.name, RUNNING)
    await cancel(rig, equal)
    await cancel(rig, urgent)
    again = await rig.until(humble.name, RUNNING)
    assert again.attempt == 2


async def test_projects_hold_by_weight_however_many_jobs_they_queue(
    start_rig: Any, keys: dict[str, Path], make_job: Any
) -> None:
    secrets = [read_secret(keys[f"{name}_key_file"]) for name in ("bootstrap", "service")]
    auth = Projects(*secrets, access_table())
    tenants = {"heavy": {"weight": 3.0}, "light": {"max_jobs": 14}}
    rig = await start_rig({"auth": auth}, max_servers=1, trainer_slots=4, tenants=tenants)
    flood = [await create_for(rig, "light", make_job()) for _ in range(14)]
    for name in flood[:4]:
        await rig.until(name, RUNNING)
    error = await refused(create_for(rig, "light", make_job()))
    assert "project light has 14 jobs" in error.message
    # Nobody is stopped for who comes later, but each slot that gets free goes to the smaller share.
    late = [await create_for(rig, "heavy", make_job()) for _ in range(5)]
    first = await rig.job(late[0])
    assert (first.project, first.state) == ("heavy", QUEUED)
    await wait_until(lambda: _position(rig, first, 1), what="it is ahead of the ten that came before it")
    for number in range(3):
        await cancel(rig, await rig.job(flood[number]))
        await rig.until(late[number], RUNNING)
    # Three to one: from now on each is followed by its own.
    await cancel(rig, await rig.job(flood[3]))
    await rig.until(flood[4], RUNNING)
    await cancel(rig, await rig.job(late[0]))
    await rig.until(late[3], RUNNING)
    assert (await rig.job(flood[5])).state == QUEUED
