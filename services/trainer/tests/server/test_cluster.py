"""A trainer in a cluster: slots, attempts, the catalog, releases, and a scheduler that is gone."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import grpc
import grpc.aio
import pytest
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import Client, TrainerProcess, pb, refused

from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import wait_until
from opentinkerapi.catalog.v1 import catalog_service_pb2, catalog_service_pb2_grpc, policy_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import server_registry_service_pb2, server_registry_service_pb2_grpc

registry_pb = server_registry_service_pb2
READY = registry_pb.ASSIGNMENT_STATE_READY
RELEASED = registry_pb.ASSIGNMENT_STATE_RELEASED


class Scheduler(
    server_registry_service_pb2_grpc.ServerRegistryServiceServicer,
    catalog_service_pb2_grpc.CatalogServiceServicer,
):
    """The part of a scheduler that a trainer sees. Remembers what it hears, pushes what a test says."""

    def __init__(self) -> None:
        self.push: asyncio.Queue[registry_pb.ServerSessionResponse] = asyncio.Queue()
        self.ready = False
        self.states: dict[str, int] = {}
        self.recorded: list[tuple[str, int]] = []
        self.kept: list[tuple[int, int]] = []
        """Of each checkpoint: how many stay beside it, and minutes until it expires."""
        self.kept_versions: list[int] = []

    async def RegisterServer(self, request, context):  # type: ignore[no-untyped-def]
        answer = registry_pb.RegisterServerResponse(server="servers/t1", attempt=1)
        answer.lease_ttl.FromSeconds(3)
        return answer

    async def ServerSession(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async def listen() -> None:
            async for request in request_iterator:
                if request.HasField("renewal"):
                    self.ready = request.renewal.ready
                    grant = registry_pb.ServerSessionResponse(lease=registry_pb.LeaseGrant())
                    grant.lease.ttl.FromSeconds(3)
                    self.push.put_nowait(grant)
                elif request.HasField("status"):
                    self.states[request.status.assignment] = request.status.state

        listener = asyncio.create_task(listen())
        try:
            while True:
                yield await self.push.get()
        finally:
            listener.cancel()

    async def DeregisterServer(self, request, context):  # type: ignore[no-untyped-def]
        return registry_pb.DeregisterServerResponse()

    async def RegisterPolicy(self, request, context):  # type: ignore[no-untyped-def]
        self.recorded.append((request.policy.name, request.attempt))
        return catalog_service_pb2.RegisterPolicyResponse(policy=request.policy)

    async def RegisterVersion(self, request, context):  # type: ignore[no-untyped-def]
        self.recorded.append((request.version.name, request.attempt))
        self.kept_versions.append(request.keep_versions)
        return catalog_service_pb2.RegisterVersionResponse(version=request.version)

    async def RegisterCheckpoint(self, request, context):  # type: ignore[no-untyped-def]
        self.recorded.append((request.checkpoint.name, request.attempt))
        ttl = request.checkpoint.expire_time.ToDatetime(UTC) - datetime.now(UTC)
        self.kept.append((request.keep_checkpoints, round(ttl.total_seconds() / 60)))
        return catalog_service_pb2.RegisterCheckpointResponse(checkpoint=request.checkpoint)

    async def assign(self, name: str, attempt: int, policies: tuple[str, ...] = ()) -> None:
        """Give the job its slot and wait until it can be used."""
        assignment = registry_pb.Assignment(assignment=name, job="jobs/j", attempt=attempt, policies=policies)
        self.push.put_nowait(registry_pb.ServerSessionResponse(assignment=assignment))
        await wait_until(lambda: self.states.get(name) == READY, 20, what=f"{name} ready")

    async def release(self, name: str) -> None:
        release = registry_pb.Release(assignment=name, job="jobs/j")
        self.push.put_nowait(registry_pb.ServerSessionResponse(release=release))
        await wait_until(lambda: self.states.get(name) == RELEASED, 20, what=f"{name} released")


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[Scheduler, str, grpc.aio.Server]]:
    servicer = Scheduler()
    server = grpc.aio.server()
    server_registry_service_pb2_grpc.add_ServerRegistryServiceServicer_to_server(servicer, server)
    catalog_service_pb2_grpc.add_CatalogServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}", server
    await server.stop(None)


async def learn(client: Client, attempt: int) -> None:
    header = client.header()
    header.attempt = attempt
    await client.forward_backward(ragged_batch(), header=header)
    step = client.header()
    step.attempt = attempt
    await client.call("OptimStep", client.step_request([header.seq], step))


def publish(client: Client, attempt: int) -> pb.PublishWeightsRequest:
    header = client.header()
    header.attempt = attempt
    return pb.PublishWeightsRequest(header=header)


def save(
    client: Client, attempt: int, *, keep: int = 0, minutes: int | None = None
) -> pb.SaveCheckpointRequest:
    header = client.header()
    header.attempt = attempt
    request = pb.SaveCheckpointRequest(header=header, keep_checkpoints=keep)
    if minutes is not None:
        request.ttl.FromSeconds(60 * minutes)
    return request


def managed(trainers: StartTrainer, address: str) -> TrainerProcess:
    return trainers(
        engine="noop",
        base_model="tiny",
        scheduler_address=address,
        scheduler_loss_s=4.0,
        server_id="t1",
        keep_checkpoints=7,
        checkpoint_ttl_s=1800.0,
    )


async def test_slots_attempts_and_the_catalog(
    trainers: StartTrainer, bucket: S3Settings, scheduler: tuple[Scheduler, str, grpc.aio.Server]
) -> None:
    known, address, _ = scheduler
    process = managed(trainers, address)
    await process.start()
    await wait_until(lambda: known.ready, 10)
    async with process.client() as client:
        assert (await refused(client.create(job="jobs/j", attempt=5))).reason == Reason.JOB_NOT_FOUND
        await known.assign("a1", 5)
        assert (await refused(client.create(job="jobs/j", attempt=4))).reason == Reason.STALE_ATTEMPT
        await client.create(job="jobs/j", attempt=5)
        await learn(client, 5)
        await client.call("PublishWeights", publish(client, 5))
        await client.done_seq(3)
        version = f"{client.policy}/versions/1"
        assert known.recorded == [(client.policy, 5), (version, 5)]
        # The job's owner may read of it.
        (told,) = [line for line in process.log().splitlines() if "operation done" in line]
        assert all(word in told for word in ("job=jobs/j ", "kind=publish_weights", "step=1")), told
        assert any("slot ready" in line and "job=jobs/j" in line for line in process.log().splitlines())

        # The slot is taken back: everything is saved, nothing is held.
        await known.release("a1")
        objects = S3ObjectStore(bucket)
        assert await objects.head(f"{client.policy}/recovery/{3:012d}/manifest.json")
        error = await refused(client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy)))
        assert error.reason == Reason.POLICY_NOT_FOUND

        # And given again, under a new attempt: the policy goes on, the old attempt does not.
        await known.assign("a2", 6, (client.policy,))
        stale = client.header(4)
        stale.attempt = 5
        error = await refused(client.forward_backward(ragged_batch(), header=stale))
        assert error.reason == Reason.STALE_ATTEMPT
        assert error.metadata["attempt"] == "6"
        await learn(client, 6)
        assert (await client.result(5)).optim_step.step == 2

        # Versions that are adapters stay; of whole models the newest few do.
        adapter = client.policy, client.seq
        await client.create(
            "whole", job="jobs/j", attempt=6, tuning=policy_pb2.Tuning(full=policy_pb2.FullTuning())
        )
        await learn(client, 6)
        await client.call("PublishWeights", publish(client, 6))
        await client.done_seq(3)
        assert known.kept_versions == [0, 4]
        client.policy, client.seq = adapter

        # How long checkpoints stay: the server's settings, or what the request says.
        await client.call("SaveCheckpoint", save(client, 6))
        await client.call("SaveCheckpoint", save(client, 6, keep=2, minutes=5))
        await client.done_seq(client.seq)
        assert known.kept == [(7, 30), (2, 5)]
        for wrong, field in (({"keep": -1}, "keep_checkpoints"), ({"minutes": 0}, "ttl")):
            seq = client.seq
            error = await refused(client.call("SaveCheckpoint", save(client, 6, **wrong)))
            assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
            client.seq = seq


async def test_without_a_scheduler_it_saves_and_ends(
    trainers: StartTrainer, bucket: S3Settings, scheduler: tuple[Scheduler, str, grpc.aio.Server]
) -> None:
    known, address, server = scheduler
    process = managed(trainers, address)
    await process.start()
    await known.assign("a1", 1)
    async with process.client() as client:
        await client.create(job="jobs/j", attempt=1)
        await learn(client, 1)
        await client.done_seq(2)
        await server.stop(None)
        # The lease ends by the trainer's own clock; what it does not hold it does not change.
        await asyncio.sleep(3.3)
        late = client.header(3)
        late.attempt = 1
        error = await refused(client.forward_backward(ragged_batch(), header=late))
        assert error.reason == Reason.STALE_ATTEMPT
        assert process.process is not None
        assert await asyncio.to_thread(process.process.wait, 20) == 0
        objects = S3ObjectStore(bucket)
        assert await objects.head(f"{client.policy}/recovery/{2:012d}/manifest.json")
