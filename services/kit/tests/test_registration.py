"""A server's membership, against a small registry over a real grpc server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from opentinker_kit.registration import Announcement, Assignment, Registration
from opentinker_kit.settings import ServerSettings
from opentinker_kit.testing import wait_until
from opentinkerapi.scheduler.v1 import job_pb2, server_registry_service_pb2, server_registry_service_pb2_grpc

pb = server_registry_service_pb2


class Registry(server_registry_service_pb2_grpc.ServerRegistryServiceServicer):
    """Grants leases, remembers what it hears, and pushes what a test tells it to."""

    def __init__(self) -> None:
        self.registered: list[pb.RegisterServerRequest] = []
        self.heard: list[pb.ServerSessionRequest] = []
        self.push: asyncio.Queue[pb.ServerSessionResponse] = asyncio.Queue()
        self.deregistered: list[str] = []
        self.ttl_s = 15
        self.silent = False

    async def RegisterServer(self, request, context):  # type: ignore[no-untyped-def]
        self.registered.append(request)
        answer = pb.RegisterServerResponse(server="servers/s1", attempt=3)
        answer.lease_ttl.FromSeconds(self.ttl_s)
        return answer

    async def ServerSession(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async def listen() -> None:
            async for request in request_iterator:
                self.heard.append(request)
                if request.HasField("renewal") and not self.silent:
                    grant = pb.ServerSessionResponse(lease=pb.LeaseGrant())
                    grant.lease.ttl.FromSeconds(self.ttl_s)
                    self.push.put_nowait(grant)

        listener = asyncio.create_task(listen())
        try:
            while True:
                yield await self.push.get()
        finally:
            listener.cancel()

    async def DeregisterServer(self, request, context):  # type: ignore[no-untyped-def]
        self.deregistered.append(request.reason)
        return pb.DeregisterServerResponse()


class Handler:
    """Records what is pushed; an assignment of a job named "bad" fails."""

    def __init__(self) -> None:
        self.assigned: list[Assignment] = []
        self.released: list[str] = []
        self.drained: list[str] = []

    async def assign(self, assignment: Assignment) -> None:
        self.assigned.append(assignment)
        if assignment.job == "jobs/bad":
            raise RuntimeError("no room")

    async def release(self, assignment: str, job: str) -> None:
        self.released.append(assignment)

    def request_drain(self, reason: str) -> None:
        self.drained.append(reason)

    def load(self) -> job_pb2.ServerLoad:
        return job_pb2.ServerLoad(running_requests=2)


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Registry, str, grpc.aio.Server]]:
    registry = Registry()
    server = grpc.aio.server()
    server_registry_service_pb2_grpc.add_ServerRegistryServiceServicer_to_server(registry, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield registry, f"127.0.0.1:{port}", server
    await server.stop(None)


def _announcement() -> Announcement:
    return Announcement(
        role=job_pb2.SLOT_ROLE_TRAINER,
        base_model="tiny",
        base_digest="d",
        options=job_pb2.ServerOptions(engine="noop"),
        slots=4,
        advertise_address="127.0.0.1:1",
        pid=1,
        server_id="s1",
    )


def _registration(
    address: str, handler: Handler, lost: list[bool], tmp_path: Path, **options: float
) -> Registration:
    settings = ServerSettings(scheduler_address=address, state_dir=tmp_path)
    return Registration(settings, _announcement(), handler, on_lost=lambda: lost.append(True), **options)  # type: ignore[arg-type]


async def test_registers_renews_and_reports_assignments(
    cluster: tuple[Registry, str, grpc.aio.Server], tmp_path: Path
) -> None:
    registry, address, _ = cluster
    handler, lost = Handler(), list[bool]()
    registration = _registration(address, handler, lost, tmp_path)
    assert not registration.holds_lease()
    registration.start()
    await wait_until(registration.holds_lease, timeout_s=10)
    assert registration.server == "servers/s1"
    assert registration.attempt == 3
    registration.set_ready()
    for name, job in (("a1", "jobs/good"), ("a2", "jobs/bad")):
        registry.push.put_nowait(
            pb.ServerSessionResponse(
                assignment=pb.Assignment(assignment=name, job=job, attempt=7, policies=["policies/p"])
            )
        )
    registry.push.put_nowait(pb.ServerSessionResponse(release=pb.Release(assignment="a1", job="jobs/good")))
    registry.push.put_nowait(pb.ServerSessionResponse(drain=pb.Drain(reason="upgrade")))

    def states() -> dict[tuple[str, int], str]:
        heard = [request.status for request in registry.heard if request.HasField("status")]
        return {(status.assignment, status.state): status.message for status in heard}

    await wait_until(lambda: len(states()) == 3, timeout_s=10)
    assert states() == {
        ("a1", pb.ASSIGNMENT_STATE_READY): "",
        ("a2", pb.ASSIGNMENT_STATE_FAILED): "no room",
        ("a1", pb.ASSIGNMENT_STATE_RELEASED): "",
    }
    assert handler.assigned[0] == Assignment("a1", "jobs/good", 7, ("policies/p",))
    assert handler.drained == ["upgrade"]
    renewals = [request.renewal for request in registry.heard if request.HasField("renewal")]
    assert renewals[-1].ready
    assert renewals[-1].load.running_requests == 2
    await registration.stop("done")
    assert registry.deregistered == ["done"]
    assert not registration.holds_lease()
    assert not lost


async def test_a_scheduler_that_is_gone_ends_the_lease_and_is_reported(
    cluster: tuple[Registry, str, grpc.aio.Server], tmp_path: Path
) -> None:
    registry, address, server = cluster
    registry.ttl_s = 1
    lost: list[bool] = []
    registration = _registration(address, Handler(), lost, tmp_path, lost_after_s=2.0)
    registration.start()
    await wait_until(registration.holds_lease, timeout_s=10)
    await server.stop(None)
    await wait_until(lambda: not registration.holds_lease(), timeout_s=10)
    assert not lost
    await wait_until(lambda: lost == [True], timeout_s=10)
    await registration.stop()


async def test_a_scheduler_that_stands_still_is_left_for_one_that_answers(tmp_path: Path) -> None:
    """It keeps its connections open and says nothing; renewals unanswered are what tells."""
    registries = [Registry(), Registry()]
    servers, ports = [], []
    for registry in registries:
        registry.ttl_s = 3
        server = grpc.aio.server()
        server_registry_service_pb2_grpc.add_ServerRegistryServiceServicer_to_server(registry, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    handler, lost = Handler(), list[bool]()
    address_file = tmp_path / "address"
    address_file.write_text(f"127.0.0.1:{ports[0]}")
    settings = ServerSettings(scheduler_address_file=address_file, state_dir=tmp_path)
    registration = Registration(settings, _announcement(), handler, on_lost=lambda: lost.append(True))
    registration.start()
    await wait_until(registration.holds_lease, timeout_s=10)
    registries[0].silent = True
    address_file.write_text(f"127.0.0.1:{ports[1]}")
    await wait_until(lambda: len(registries[1].registered) == 1, timeout_s=10)
    await wait_until(registration.holds_lease, timeout_s=10)
    assert (handler.drained, lost) == ([], [])
    await registration.stop()
    for server in servers:
        await server.stop(None)
