"""ServerRegistryService: servers that register themselves, sessions, fencing."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from services.scheduler.tests.asking import refused

from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import OpenTinkerError, from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as jobs_pb
from opentinkerapi.scheduler.v1 import server_registry_service_pb2 as pb
from opentinkerapi.scheduler.v1.server_registry_service_pb2_grpc import ServerRegistryServiceStub

TRAINER = job_pb2.SLOT_ROLE_TRAINER


def registration(instance: str = "i1", **fields: Any) -> pb.RegisterServerRequest:
    values = {
        "role": TRAINER,
        "base_model": "some-model",
        "slots": 2,
        "advertise_address": "10.0.0.1:5",
        "options": job_pb2.ServerOptions(engine="noop", dtype="float32", max_lora_rank=64),
        "ready": True,
        **fields,
    }
    return pb.RegisterServerRequest(instance_id=instance, **values)


class Session:
    """A server's end of a session."""

    def __init__(self, rig: Any, server: str, attempt: int) -> None:
        self._up: asyncio.Queue[pb.ServerSessionRequest | None] = asyncio.Queue()
        self.send(hello=pb.SessionHello(server=server, attempt=attempt))
        self.call = rig.registry.ServerSession(self._requests())

    async def _requests(self) -> AsyncIterator[pb.ServerSessionRequest]:
        while (request := await self._up.get()) is not None:
            yield request

    def send(self, **message: Any) -> None:
        self._up.put_nowait(pb.ServerSessionRequest(**message))

    def renew(self, **fields: Any) -> None:
        self.send(renewal=pb.SessionRenewal(**fields))

    def report(self, assignment: str, state: int, message: str = "") -> None:
        status = pb.AssignmentStatus(assignment=assignment, state=state, message=message)  # type: ignore[arg-type]
        self.send(status=status)

    async def next(self, kind: str) -> Any:
        """The next message of a kind; leases in between are passed over."""
        while True:
            message = await asyncio.wait_for(self.call.read(), 5.0)
            assert message is not grpc.aio.EOF
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    async def ended(self) -> OpenTinkerError:
        return await refused(self._to_the_end())

    async def _to_the_end(self) -> None:
        while await asyncio.wait_for(self.call.read(), 5.0) is not grpc.aio.EOF:
            pass

    def close(self) -> None:
        self._up.put_nowait(None)


@pytest.fixture
async def static(start_rig: Any) -> Any:
    return await start_rig(launcher="static", server_lease_s=2.0)


async def test_a_server_that_registers_itself_serves_jobs(static: Any, make_slot: Any) -> None:
    job = await static.create_job(make_slot(engine=""))
    registered = await static.registry.RegisterServer(registration())
    assert registered.attempt == 1
    assert registered.lease_ttl.seconds == 2
    session = Session(static, registered.server, registered.attempt)
    given = await session.next("assignment")
    assert (given.job, given.attempt) == (job.name, 1)
    assert (await static.job(job.name)).state == job_pb2.JOB_STATE_STARTING
    session.report(given.assignment, pb.ASSIGNMENT_STATE_READY)
    await static.until(job.name, job_pb2.JOB_STATE_RUNNING)
    (endpoint,) = (await static.renew(job.name)).endpoints
    assert (endpoint.address, endpoint.server) == ("10.0.0.1:5", registered.server)
    await static.jobs.CancelJob(jobs_pb.CancelJobRequest(name=job.name, request_id="c"))
    released = await session.next("release")
    assert released.assignment == given.assignment
    # The slot is somebody's until the server says that it is free.
    (server,) = await static.servers()
    assert server.slots_used == 0
    session.report(given.assignment, pb.ASSIGNMENT_STATE_RELEASED)
    session.close()


async def test_the_same_start_gets_the_same_server(static: Any) -> None:
    first = await static.registry.RegisterServer(registration())
    again = await static.registry.RegisterServer(registration())
    assert again == first
    other = await static.registry.RegisterServer(registration("i2"))
    assert other.server != first.server
    assert len(await static.servers()) == 2


async def test_a_restarted_server_replaces_itself(static: Any) -> None:
    first = await static.registry.RegisterServer(registration("i1", server_id="trainer-0"))
    session = Session(static, first.server, first.attempt)
    await session.next("lease")
    second = await static.registry.RegisterServer(registration("i2", server_id="trainer-0"))
    assert second.attempt == first.attempt + 1
    assert [server.name for server in await static.servers()] == [second.server]
    assert (await session.ended()).reason == Reason.STALE_ATTEMPT


async def test_a_new_session_is_told_everything_again(static: Any, make_slot: Any) -> None:
    job = await static.create_job(make_slot(engine=""))
    registered = await static.registry.RegisterServer(registration())
    first = Session(static, registered.server, registered.attempt)
    given = await first.next("assignment")
    second = Session(static, registered.server, registered.attempt)
    assert await second.next("assignment") == given
    assert (await first.ended()).reason == Reason.STALE_ATTEMPT
    second.report(given.assignment, pb.ASSIGNMENT_STATE_READY)
    await static.until(job.name, job_pb2.JOB_STATE_RUNNING)
    third = Session(static, registered.server, registered.attempt)
    assert await third.next("assignment") == given
    third.close()


async def test_a_session_needs_the_right_token(static: Any) -> None:
    registered = await static.registry.RegisterServer(registration())
    assert (await Session(static, registered.server, 7).ended()).reason == Reason.STALE_ATTEMPT
    assert (await Session(static, "servers/none", 1).ended()).reason == Reason.SERVER_NOT_FOUND


async def test_the_first_message_is_the_hello(static: Any) -> None:
    async def requests() -> AsyncIterator[pb.ServerSessionRequest]:
        yield pb.ServerSessionRequest(renewal=pb.SessionRenewal())

    with pytest.raises(grpc.RpcError) as caught:
        await static.registry.ServerSession(requests()).read()
    assert from_rpc_error(caught.value).reason == Reason.INVALID_FIELD


async def test_a_silent_server_is_lost_and_its_job_starts_again(static: Any, make_slot: Any) -> None:
    job = await static.create_job(make_slot(engine=""))
    registered = await static.registry.RegisterServer(registration())
    session = Session(static, registered.server, registered.attempt)
    given = await session.next("assignment")
    session.report(given.assignment, pb.ASSIGNMENT_STATE_READY)
    await static.until(job.name, job_pb2.JOB_STATE_RUNNING)
    assert (await session.ended()).reason == Reason.STALE_ATTEMPT
    job = await static.until(job.name, job_pb2.JOB_STATE_STARTING)
    assert job.attempt == 2
    (lost,) = await static.servers(include_ended=True)
    assert lost.state == job_pb2.SERVER_STATE_LOST
    # What the old holder says is not heard.
    again = await static.registry.RegisterServer(registration("i2"))
    session = Session(static, again.server, again.attempt)
    given = await session.next("assignment")
    assert given.attempt == 2
    session.close()


async def test_renewals_keep_a_server(static: Any) -> None:
    registered = await static.registry.RegisterServer(registration(ready=False))
    session = Session(static, registered.server, registered.attempt)
    for _ in range(6):
        session.renew(load=job_pb2.ServerLoad(queued_requests=4), ready=True)
        await session.next("lease")
        await asyncio.sleep(0.5)
    (server,) = await static.servers()
    assert (server.state, server.load.queued_requests) == (job_pb2.SERVER_STATE_READY, 4)
    session.close()


async def test_a_server_that_leaves(static: Any) -> None:
    registered = await static.registry.RegisterServer(registration())
    request = pb.DeregisterServerRequest(server=registered.server, attempt=registered.attempt, reason="bye")
    await static.registry.DeregisterServer(request)
    assert not await static.servers()
    assert (await refused(static.registry.DeregisterServer(request))).reason == Reason.STALE_ATTEMPT


@pytest.mark.parametrize("slots", [-1, 1025])
async def test_slots_have_bounds(static: Any, slots: int) -> None:
    error = await refused(static.registry.RegisterServer(registration(slots=slots)))
    assert error.reason == Reason.INVALID_FIELD


async def test_a_digest_of_any_length_is_no_digest(static: Any) -> None:
    error = await refused(static.registry.RegisterServer(registration(base_digest="d" * 81)))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "base_digest")


async def test_users_cannot_register_servers(static: Any) -> None:
    """A user's key reaches users' methods only."""
    stub = ServerRegistryServiceStub(static.channel("bootstrap"))
    assert (await refused(stub.RegisterServer(registration()))).code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_launched_id_is_taken_once(start_rig: Any) -> None:
    rig = await start_rig()
    job = await rig.create_job()
    await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
    (server,) = await rig.servers()
    thief = registration("thief", server_id=server.name.removeprefix("servers/"))
    assert (await refused(rig.registry.RegisterServer(thief))).reason == Reason.STALE_ATTEMPT


async def test_a_slot_that_is_never_freed_is_taken_back(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(launcher="static", release_timeout_s=0.3)
    job = await rig.create_job(make_slot(engine="", count=2))
    registered = await rig.registry.RegisterServer(registration(slots=2))
    session = Session(rig, registered.server, registered.attempt)
    await session.next("assignment")
    await rig.jobs.CancelJob(jobs_pb.CancelJobRequest(name=job.name, request_id="c"))
    waiting = await rig.create_job(make_slot(engine=""))
    assert (await session.next("assignment")).job == job.name
    await session.next("release")

    async def placed() -> bool:
        return (await rig.job(waiting.name)).state == job_pb2.JOB_STATE_STARTING

    await wait_until(placed)
    session.close()


async def test_models_are_those_of_the_servers(start_rig: Any, make_slot: Any, make_job: Any) -> None:
    rig = await start_rig({"models": None}, launcher="static")
    # While nobody is there, any name may still come.
    await rig.create_job(make_slot(engine="", model="whatever"))
    await rig.registry.RegisterServer(registration())
    await rig.create_job(make_slot(engine=""))
    request = jobs_pb.CreateJobRequest(request_id="r", job=make_job(make_slot(engine="", model="whatever")))
    error = await refused(rig.jobs.CreateJob(request))
    assert error.reason == Reason.UNKNOWN_MODEL
    assert "they serve: some-model" in error.message
    request = jobs_pb.CreateJobRequest(request_id="r", job=make_job(make_slot(engine="torch")))
    error = await refused(rig.jobs.CreateJob(request))
    assert error.reason == Reason.CANNOT_BE_SATISFIED
    assert "has engine=torch; there are: engine=noop, dtype=float32, max_lora_rank=64" in error.message
    cluster = await rig.jobs.GetCluster(jobs_pb.GetClusterRequest())
    assert [(model.model, model.loaded) for model in cluster.models] == [("some-model", True)]
    assert list(cluster.trainer_engines) == ["noop"]
