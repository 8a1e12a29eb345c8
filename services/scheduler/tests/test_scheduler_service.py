"""SchedulerService over real gRPC: what is refused, what is remembered, what waits and why."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from services.scheduler.tests.asking import refused

from opentinker_kit.clock import ManualClock
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb

INFERENCE = job_pb2.SLOT_ROLE_INFERENCE


@pytest.fixture
async def quiet(start_rig: Any) -> Any:
    """A cluster whose servers never register, so that jobs stay STARTING."""
    return await start_rig(behavior="silent")


async def test_creating_twice_under_one_request_id_creates_once(quiet: Any, make_job: Any) -> None:
    request = pb.CreateJobRequest(request_id="same", job=make_job(display_name="mine", labels={"a": "b"}))
    first = await quiet.jobs.CreateJob(request)
    again = await quiet.jobs.CreateJob(request)
    assert again.job == first.job
    assert first.job_token
    assert again.job_token
    assert (first.job.display_name, dict(first.job.labels)) == ("mine", {"a": "b"})
    assert first.job.lease_ttl.ToTimedelta().total_seconds() == 600
    assert len((await quiet.jobs.ListJobs(pb.ListJobsRequest())).jobs) == 1
    error = await refused(
        quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="same", job=make_job(display_name="other")))
    )
    assert error.reason == Reason.REQUEST_ID_REUSED


async def test_of_many_equal_requests_at_once_one_creates(quiet: Any, make_job: Any) -> None:
    stub, request = quiet.jobs, pb.CreateJobRequest(request_id="same", job=make_job())
    answers = await asyncio.gather(*(stub.CreateJob(request) for _ in range(16)))
    assert len({answer.job.name for answer in answers}) == 1


async def test_a_call_that_was_cut_off_leaves_no_job_without_a_lease(start_rig: Any, make_job: Any) -> None:
    clock = ManualClock()
    rig = await start_rig({"clock": clock}, launcher="static")
    request = pb.CreateJobRequest(request_id="cut", job=make_job(lease_ttl=Duration(seconds=30)))
    # The job is recorded, as by a call whose caller went away before the answer.
    rig.scheduler.database.run, run = _cancelled_after(rig.scheduler.database.run), rig.scheduler.database.run
    with pytest.raises(grpc.RpcError):
        await rig.jobs.CreateJob(request)
    rig.scheduler.database.run = run
    (job,) = (await rig.jobs.ListJobs(pb.ListJobsRequest())).jobs
    for _ in range(10):
        await clock.advance(4.0)
        await rig.scheduler.reconciler.tick()
    await rig.until(job.name, job_pb2.JOB_STATE_PAUSED)


def _cancelled_after(run: Any) -> Any:
    """Does the work, and loses its answer if that was a job."""

    async def cut(work: Any) -> Any:
        result = await run(work)
        if isinstance(result, pb.CreateJobResponse):
            raise ConnectionError("the caller is gone")
        return result

    return cut


async def test_an_unknown_model_lists_the_known_ones(quiet: Any, make_job: Any, make_slot: Any) -> None:
    job = make_job(make_slot(), make_slot(INFERENCE, model="gpt-17"))
    error = await refused(quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="r", job=job)))
    assert error.reason == Reason.UNKNOWN_MODEL
    assert error.violations[0][0] == "job.slots[1].base_model"
    assert "some-model, other-model" in error.message


@pytest.mark.parametrize(
    ("kind", "engine", "reason", "says"),
    [
        (job_pb2.JOB_KIND_FULL_RL, "noop", Reason.UNSUPPORTED_COMBINATION, "FULL_RL"),
        (job_pb2.JOB_KIND_LORA_RL, "jax", Reason.INVALID_FIELD, "torch, noop"),
        (17, "noop", Reason.INVALID_FIELD, "job kind"),
    ],
)
async def test_refusals_reach_the_caller_with_their_reason(
    quiet: Any, make_job: Any, make_slot: Any, kind: int, engine: str, reason: Reason, says: str
) -> None:
    job = make_job(make_slot(engine=engine), kind=kind)
    error = await refused(quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="r", job=job)))
    assert error.reason == reason
    assert says in error.message
    # A refusal is not kept: put right, the same id works.
    await quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="r", job=make_job()))


async def test_what_the_cluster_can_never_hold_is_refused(quiet: Any, make_job: Any, make_slot: Any) -> None:
    job = make_job(make_slot(count=257))
    error = await refused(quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="r", job=job)))
    assert error.reason == Reason.CANNOT_BE_SATISFIED
    assert "max_servers is 32" in error.message


async def test_a_required_field_is_named(quiet: Any, make_slot: Any) -> None:
    job = job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[job_pb2.SlotSpec(base_model="m")])
    error = await refused(quiet.jobs.CreateJob(pb.CreateJobRequest(request_id="r", job=job)))
    assert error.reason == Reason.REQUIRED_FIELD
    assert "slots[0].role" in error.violations[0][0]


@pytest.mark.parametrize("name", ["jobs/nothere", "jobs/", "policies/x", "jobs/../x", "jobs/a/b"])
async def test_no_such_job(quiet: Any, name: str) -> None:
    stub = quiet.jobs
    for call in (
        stub.GetJob(pb.GetJobRequest(name=name)),
        stub.CancelJob(pb.CancelJobRequest(name=name, request_id="c")),
        stub.RenewJobLease(pb.RenewJobLeaseRequest(name=name)),
        stub.WatchJob(pb.WatchJobRequest(name=name)).read(),
    ):
        assert (await refused(call)).reason == Reason.JOB_NOT_FOUND


async def test_secrets_are_only_where_they_belong(quiet: Any) -> None:
    assert "job_token" not in pb.GetJobResponse.DESCRIPTOR.fields_by_name
    job = await quiet.create_job()
    lease = await quiet.renew(job.name)
    assert lease.job_token
    assert not lease.endpoints


async def test_wrong_and_missing_keys(quiet: Any) -> None:
    from opentinkerapi.runtime.channels import open_channel
    from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

    for key in (None, "wrong"):
        async with open_channel(quiet.address, key=key) as channel:
            call = SchedulerServiceStub(channel).GetCluster(pb.GetClusterRequest())
            with pytest.raises(grpc.RpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_pages_hold_everything_once(quiet: Any, make_job: Any) -> None:
    names = [(await quiet.create_job()).name for _ in range(5)]
    await quiet.jobs.CancelJob(pb.CancelJobRequest(name=names[2], request_id="c"))
    seen: list[str] = []
    token = ""
    while True:
        page = await quiet.jobs.ListJobs(pb.ListJobsRequest(page_size=2, page_token=token))
        seen += [job.name for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
    assert seen == names[::-1]
    only = await quiet.jobs.ListJobs(pb.ListJobsRequest(states=[job_pb2.JOB_STATE_CANCELLED]))
    assert [job.name for job in only.jobs] == [names[2]]
    first = await quiet.jobs.ListJobs(pb.ListJobsRequest(page_size=1))
    for request in (
        pb.ListJobsRequest(page_token="nonsense"),
        pb.ListJobsRequest(page_token=first.next_page_token, states=[job_pb2.JOB_STATE_QUEUED]),
    ):
        assert (await refused(quiet.jobs.ListJobs(request))).reason == Reason.INVALID_PAGE_TOKEN
    error = await refused(quiet.jobs.ListServers(pb.ListServersRequest(page_token=first.next_page_token)))
    assert error.reason == Reason.INVALID_PAGE_TOKEN
    assert (await refused(quiet.jobs.ListJobs(pb.ListJobsRequest(page_size=-1)))).reason == (
        Reason.INVALID_FIELD
    )


async def test_watching_sees_every_state_until_the_end(rig: Any) -> None:
    job = await rig.create_job()
    states: list[int] = []

    async def watch() -> None:
        async for change in rig.jobs.WatchJob(pb.WatchJobRequest(name=job.name)):
            if not states or states[-1] != change.job.state:
                states.append(change.job.state)

    watching = asyncio.create_task(watch())
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    await asyncio.wait_for(watching, 5.0)
    assert states[-3:] == [
        job_pb2.JOB_STATE_STARTING,
        job_pb2.JOB_STATE_RUNNING,
        job_pb2.JOB_STATE_CANCELLED,
    ]


async def test_watchers_are_told_when_the_scheduler_stops(start_rig: Any) -> None:
    rig = await start_rig(behavior="silent")
    job = await rig.create_job()
    watch = rig.jobs.WatchJob(pb.WatchJobRequest(name=job.name))
    await watch.read()
    stopping = asyncio.create_task(rig.scheduler.server.drain())
    error = await refused(_to_the_end(watch))
    assert error.reason == Reason.DRAINING
    await stopping


async def _to_the_end(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_outcomes_are_checked(quiet: Any) -> None:
    job = await quiet.create_job()
    await quiet.until(job.name, job_pb2.JOB_STATE_STARTING)
    request = pb.FinishJobRequest(name=job.name, request_id="f", outcome=job_pb2.JOB_STATE_RUNNING)
    assert (await refused(quiet.jobs.FinishJob(request))).reason == Reason.INVALID_FIELD
    request.outcome, request.message = job_pb2.JOB_STATE_FAILED, "x" * 10_001
    error = await refused(quiet.jobs.FinishJob(request))
    assert (error.reason, error.violations[0][0]) == (Reason.INVALID_FIELD, "message")
    request.message = "NaN"
    done = (await quiet.jobs.FinishJob(request)).job
    assert (done.state, done.outcome_message, done.error.message) == (
        job_pb2.JOB_STATE_FAILED,
        "NaN",
        "NaN",
    )
    other = pb.FinishJobRequest(name=job.name, request_id="g", outcome=job_pb2.JOB_STATE_FAILED)
    error = await refused(quiet.jobs.FinishJob(other))
    assert error.reason == Reason.INVALID_STATE
    assert error.metadata["state"] == "FAILED"
    assert (await refused(quiet.jobs.RenewJobLease(pb.RenewJobLeaseRequest(name=job.name)))).reason == (
        Reason.INVALID_STATE
    )


async def test_pausing_frees_and_resuming_gets_slots_back(rig: Any) -> None:
    job = await rig.create_job()
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    await rig.jobs.PauseJob(pb.PauseJobRequest(name=job.name, request_id="p"))
    paused = await rig.job(job.name)
    assert paused.state == job_pb2.JOB_STATE_PAUSED
    error = await refused(rig.jobs.RenewJobLease(pb.RenewJobLeaseRequest(name=job.name)))
    assert error.reason == Reason.INVALID_STATE
    assert "ResumeJob" in error.message
    (server,) = await rig.servers()
    await wait_until(lambda: any("release" in told for told in rig.told(server)))
    resumed = (await rig.jobs.ResumeJob(pb.ResumeJobRequest(name=job.name, request_id="r"))).job
    assert resumed.state == job_pb2.JOB_STATE_QUEUED
    again = await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    assert again.attempt == 2
    assert [e.attempt for e in (await rig.renew(job.name)).endpoints] == [2]
    error = await refused(rig.jobs.ResumeJob(pb.ResumeJobRequest(name=job.name, request_id="r2")))
    assert error.reason == Reason.INVALID_STATE


async def test_the_cluster_describes_itself(start_rig: Any) -> None:
    rig = await start_rig(env_host_address="127.0.0.1:7", max_servers=9)
    cluster = await rig.jobs.GetCluster(pb.GetClusterRequest())
    assert cluster.cluster
    assert cluster.version
    assert (cluster.max_servers, cluster.running_servers) == (9, 0)
    assert cluster.env_host_address == "127.0.0.1:7"
    assert {model.model: model.loaded for model in cluster.models} == {
        "some-model": False,
        "other-model": False,
    }
    assert "noop" in cluster.trainer_engines
    assert "noop" in cluster.inference_engines
    job = await rig.create_job()
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    cluster = await rig.jobs.GetCluster(pb.GetClusterRequest())
    assert cluster.running_servers == 1
    assert {model.model for model in cluster.models if model.loaded} == {"some-model"}
    (server,) = await rig.servers()
    await wait_until(lambda: _loaded(rig), what="its load is known")
    assert server.HasField("expire_time")


async def _loaded(rig: Any) -> bool:
    (server,) = await rig.servers()
    return bool(server.load.running_requests == 3)


async def test_waiting_jobs_say_why(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(behavior="silent", max_servers=1)
    await rig.create_job()
    waiting = [await rig.create_job(make_slot(model="other-model")) for _ in range(2)]

    async def explained() -> bool:
        return (await rig.job(waiting[1].name)).queue_position == 2

    await wait_until(explained)
    job = await rig.job(waiting[1].name)
    assert job.state_reason == (
        "waiting for 1 trainer slot of other-model on noop: the limit max_servers=1 is reached; 1 job ahead"
    )
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=waiting[0].name, request_id="c"))

    async def moved_up() -> bool:
        return (await rig.job(waiting[1].name)).queue_position == 1

    await wait_until(moved_up)
