"""Jobs whose client is gone, on a clock that the test moves."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from opentinker_kit.clock import ManualClock
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.mark.parametrize(
    ("wish", "state"),
    [
        (job_pb2.ON_CLIENT_LOSS_UNSPECIFIED, job_pb2.JOB_STATE_PAUSED),
        (job_pb2.ON_CLIENT_LOSS_PAUSE, job_pb2.JOB_STATE_PAUSED),
        (job_pb2.ON_CLIENT_LOSS_CANCEL, job_pb2.JOB_STATE_CANCELLED),
    ],
)
async def test_a_job_that_nobody_renews(start_rig: Any, clock: ManualClock, wish: int, state: int) -> None:
    rig = await start_rig({"clock": clock}, launcher="static")
    job = await rig.create_job(on_client_loss=wish, lease_ttl=Duration(seconds=60))
    for _ in range(3):
        await advance(rig, clock, 50)
        await rig.renew(job.name)
    assert (await rig.job(job.name)).state == job_pb2.JOB_STATE_QUEUED
    await advance(rig, clock, 61)
    lost = await rig.until(job.name, state)
    assert "no client renewed its lease for 60 s" in lost.state_reason


async def test_a_detached_job_needs_no_client(start_rig: Any, clock: ManualClock, make_slot: Any) -> None:
    rig = await start_rig({"clock": clock}, launcher="static")
    job = await rig.create_job(
        make_slot(job_pb2.SLOT_ROLE_INFERENCE),
        kind=job_pb2.JOB_KIND_INFERENCE,
        on_client_loss=job_pb2.ON_CLIENT_LOSS_DETACH,
        lease_ttl=Duration(seconds=10),
    )
    await advance(rig, clock, 100)
    assert (await rig.job(job.name)).state == job_pb2.JOB_STATE_QUEUED


async def test_a_job_with_a_lease_of_its_own_length(start_rig: Any, clock: ManualClock) -> None:
    rig = await start_rig({"clock": clock}, launcher="static")
    job = await rig.create_job(lease_ttl=Duration(seconds=30))
    assert job.lease_ttl.seconds == 30
    await advance(rig, clock, 31)
    await rig.until(job.name, job_pb2.JOB_STATE_PAUSED)
    await rig.jobs.ResumeJob(pb.ResumeJobRequest(name=job.name, request_id="r"))
    # Resuming gives a new lease.
    await advance(rig, clock, 29)
    assert (await rig.job(job.name)).state == job_pb2.JOB_STATE_QUEUED


async def test_watching_is_not_renewing(start_rig: Any, clock: ManualClock) -> None:
    rig = await start_rig({"clock": clock}, launcher="static")
    job = await rig.create_job()
    watch = rig.jobs.WatchJob(pb.WatchJobRequest(name=job.name))
    await watch.read()
    await advance(rig, clock, 601)
    await rig.until(job.name, job_pb2.JOB_STATE_PAUSED)
    watch.cancel()


async def test_a_leader_that_stood_still_forgives(start_rig: Any, clock: ManualClock) -> None:
    rig = await start_rig({"clock": clock}, launcher="static")
    job = await rig.create_job()
    # One leap, as after a suspended machine: nobody could have renewed.
    await clock.advance(3600)
    await rig.scheduler.reconciler.tick()
    await advance(rig, clock, 500)
    assert (await rig.job(job.name)).state == job_pb2.JOB_STATE_QUEUED


async def advance(rig: Any, clock: ManualClock, seconds: float) -> None:
    """Move the clock in steps that the scheduler's ticks follow."""
    while seconds > 0:
        await clock.advance(min(4.0, seconds))
        await rig.scheduler.reconciler.tick()
        seconds -= 4.0
