"""Two schedulers on one PostgreSQL, as processes: the one that leads is killed or stands still under load."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psycopg
import pytest

from opentinker_kit.files import make_key_file, write_json
from opentinker_kit.healthcheck import is_serving
from opentinker_kit.processes import free_port
from opentinker_kit.registration import Announcement, Assignment, Registration
from opentinker_kit.settings import ServerSettings, read_secret
from opentinker_kit.testing import PostgresServer, start_postgres, wait_until
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import DeadlineExceeded, Unavailable, from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

FAIL_OVER_S = 20.0
START_S = 60.0
"""For two processes to come up, on a machine that does other things too."""
CLIENTS = 4
MODEL = "some-model"

pytestmark = pytest.mark.slow


@dataclass
class Replica:
    """One scheduler process."""

    folder: Path
    settings: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.settings['listen_port']}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / "scheduler.json"
        write_json(path, self.settings, mode=0o600)
        argv = [sys.executable, "-m", "opentinker_scheduler", "--settings", str(path)]
        with (self.folder / "scheduler.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    def send(self, signum: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, START_S)


@dataclass
class Pair:
    """Two schedulers, and clients that know both addresses."""

    replicas: list[Replica]
    keys: dict[str, Path]
    database: psycopg.Connection[Any]
    channels: list[grpc.aio.Channel] = field(default_factory=list)
    registrations: list[Registration] = field(default_factory=list)

    @property
    def addresses(self) -> str:
        return ",".join(replica.address for replica in self.replicas)

    def stub(self, address: str = "") -> Any:
        channel = open_channel(address or self.addresses, key=read_secret(self.keys["bootstrap_key_file"]))
        self.channels.append(channel)
        return SchedulerServiceStub(channel)

    async def leader(self) -> Replica:
        """The one that answers, once there is one."""
        found: list[Replica] = []

        async def answers() -> bool:
            for replica in self.replicas:
                if replica.process is not None and await _answers(self.stub(replica.address)):
                    found.append(replica)
            return bool(found)

        await wait_until(answers, START_S, what="a scheduler leads")
        return found[0]

    def other(self, replica: Replica) -> Replica:
        return next(each for each in self.replicas if each is not replica)

    def stored(self) -> list[tuple[Any, ...]]:
        """Everything that schedulers write by themselves, but for the lease."""
        rows: list[tuple[Any, ...]] = []
        for table, order in (
            ("jobs", "id"),
            ("servers", "id"),
            ("assignments", "id"),
            ("request_ids", "request_id"),
        ):
            rows += self.database.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall()
        return rows

    async def serve(self) -> tuple[Registration, "Slots"]:
        """A server that registers itself, as trainers do."""
        settings = ServerSettings(
            scheduler_address=self.addresses, service_key_file=self.keys["service_key_file"]
        )
        announcement = Announcement(
            role=job_pb2.SLOT_ROLE_TRAINER,
            base_model=MODEL,
            base_digest="d" * 64,
            options=job_pb2.ServerOptions(engine="noop"),
            slots=8,
            advertise_address="127.0.0.1:1",
            pid=os.getpid(),
            server_id="trainer",
        )
        slots = Slots()
        registration = Registration(settings, announcement, slots, on_lost=lambda: slots.ends.append("lost"))
        self.registrations.append(registration)
        registration.start()
        registration.set_ready()
        await wait_until(registration.holds_lease, START_S, what="the server is registered")
        return registration, slots


class Slots:
    """What a server without an engine does."""

    def __init__(self) -> None:
        self.given: list[Assignment] = []
        self.ends: list[str] = []

    async def assign(self, assignment: Assignment) -> None:
        self.given.append(assignment)

    async def release(self, assignment: str, job: str) -> None:
        self.ends.append(f"released {job}")

    def request_drain(self, reason: str) -> None:
        self.ends.append(f"drain: {reason}")

    def load(self) -> job_pb2.ServerLoad:
        return job_pb2.ServerLoad()


@dataclass
class Load:
    """Clients that create jobs, each asking again under the same request id until it is answered."""

    stub: Any
    acknowledged: dict[str, str] = field(default_factory=dict)
    """Job names by request id."""
    stopped: bool = False

    async def client(self, number: int) -> None:
        for count in itertools.count():
            if self.stopped:
                return
            await self.create(f"client-{number}-{count}")

    async def create(self, request_id: str) -> None:
        request = pb.CreateJobRequest(request_id=request_id, job=new_job())
        while True:
            try:
                answer = await self.stub.CreateJob(request, timeout=5.0)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                # Whatever goes wrong while schedulers change may be asked again.
                assert isinstance(failure, Unavailable | DeadlineExceeded), failure
                await asyncio.sleep(0.1)
            else:
                self.acknowledged[request_id] = answer.job.name
                return


def new_job() -> job_pb2.Job:
    options = job_pb2.ServerOptions(engine="noop")
    slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_TRAINER, base_model=MODEL, options=options)
    return job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot])


async def _answers(stub: Any) -> bool:
    try:
        await stub.GetCluster(pb.GetClusterRequest(), timeout=1.0)
    except grpc.RpcError:
        return False
    return True


async def all_jobs(stub: Any) -> set[str]:
    names: set[str] = set()
    token = ""
    while True:
        page = await stub.ListJobs(pb.ListJobsRequest(page_size=1000, page_token=token), timeout=10.0)
        names |= {job.name for job in page.jobs}
        token = page.next_page_token
        if not token:
            return names


@pytest.fixture
async def pair(
    tmp_path: Path, keys: dict[str, Path], postgres_server: PostgresServer, empty_tables: str
) -> AsyncIterator[Pair]:
    name = postgres_server.make_database(empty_tables)
    make_key_file(tmp_path / "job_tokens.key")
    shared = {
        **{key: str(path) for key, path in keys.items()},
        "database_url": postgres_server.url(name),
        "database_password_file": str(postgres_server.password_file),
        "job_token_key_file": str(tmp_path / "job_tokens.key"),
        "launcher": "static",
        "drain_s": 2.0,
        "default_tenant": {"max_jobs": None},
    }
    replicas = [
        Replica(tmp_path / f"replica-{number}", {**shared, "listen_port": free_port()}) for number in range(2)
    ]
    for replica in replicas:
        replica.settings["state_dir"] = str(replica.folder)
    two = Pair(replicas, keys, postgres_server.connect(name))
    for replica in replicas:
        replica.start()
    yield two
    for registration in two.registrations:
        await registration.stop()
    for channel in two.channels:
        await channel.close()
    two.database.close()
    for replica in replicas:
        if replica.process is not None and replica.process.poll() is None:
            replica.process.kill()
            replica.process.wait()


async def test_the_leader_is_killed_under_load(pair: Pair) -> None:
    leader = await pair.leader()
    registration, slots = await pair.serve()
    stub = pair.stub()
    job = (await stub.CreateJob(pb.CreateJobRequest(request_id="first", job=new_job()))).job.name
    watch = stub.WatchJob(pb.WatchJobRequest(name=job))
    await _until_running(watch)
    load = Load(stub)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    await wait_until(lambda: len(load.acknowledged) > 20, START_S, what="jobs are created")
    leader.send(signal.SIGKILL)
    await leader.ended()
    leader.process = None
    before = len(load.acknowledged)
    await wait_until(lambda: len(load.acknowledged) > before + CLIENTS, FAIL_OVER_S, what="the other answers")
    load.stopped = True
    await asyncio.gather(*clients)
    # Acknowledged once and for all: every job is there, and each request made one.
    names = await all_jobs(stub)
    assert set(load.acknowledged.values()) <= names
    assert names == {job, *load.acknowledged.values()}
    assert len(set(load.acknowledged.values())) == len(load.acknowledged)
    # A replay of what the dead one acknowledged is answered the same.
    known = dict(load.acknowledged)
    await load.create("client-0-0")
    assert load.acknowledged == known
    # What ran goes on: the server found the new leader, and its slot is still the job's.
    await wait_until(registration.holds_lease, FAIL_OVER_S, what="the server has its lease again")
    await asyncio.sleep(1.0)
    now = (await stub.GetJob(pb.GetJobRequest(name=job))).job
    assert (now.state, now.attempt) == (job_pb2.JOB_STATE_RUNNING, slots.given[0].attempt)
    assert slots.ends == []
    # The dead one comes back, and stands by.
    leader.start()
    told = pair.stub(leader.address)

    async def stands_by() -> bool:
        try:
            # Time for what gRPC repeats by itself before it gives up.
            await told.GetCluster(pb.GetClusterRequest(), timeout=30.0)
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            return failure.metadata.get("leader") == pair.other(leader).address
        raise AssertionError("two answer")

    await wait_until(stands_by, START_S, what="the old leader stands by")
    await _answers(stub)


async def test_the_leader_stands_still_under_load(pair: Pair) -> None:
    leader = await pair.leader()
    registration, slots = await pair.serve()
    stub, old = pair.stub(), pair.stub(leader.address)
    job = (await stub.CreateJob(pb.CreateJobRequest(request_id="first", job=new_job()))).job.name
    await _until_running(stub.WatchJob(pb.WatchJobRequest(name=job)))
    assert await _answers(old)
    load = Load(stub)
    clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
    await wait_until(lambda: len(load.acknowledged) > 20, START_S, what="jobs are created")
    leader.send(signal.SIGSTOP)
    # Requests that the old one has in its socket when it wakes up.
    late = [
        old.CreateJob(pb.CreateJobRequest(request_id=f"late-{number}", job=new_job()), timeout=60.0)
        for number in range(8)
    ]
    waiting = [asyncio.ensure_future(call) for call in late]
    new = pair.stub(pair.other(leader).address)
    await wait_until(lambda: _answers(new), FAIL_OVER_S, what="the other leads")
    load.stopped = True
    await asyncio.gather(*clients)
    assert set(load.acknowledged.values()) <= await all_jobs(new)
    await wait_until(registration.holds_lease, FAIL_OVER_S, what="the server has its lease again")
    # It sleeps past the lease that the new leader gave everybody.
    await asyncio.sleep(2.0)
    before = pair.stored()
    leader.send(signal.SIGCONT)
    assert await leader.ended() == 75
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, grpc.RpcError) for answer in answers)
    assert pair.stored() == before
    now = (await new.GetJob(pb.GetJobRequest(name=job))).job
    assert (now.state, now.attempt) == (job_pb2.JOB_STATE_RUNNING, slots.given[0].attempt)
    assert slots.ends == []
    log = (leader.folder / "scheduler.log").read_text()
    assert any(
        "another scheduler leads" in json.loads(line)["event"] for line in log.splitlines() if line[:1] == "{"
    )


async def test_an_orderly_stop_hands_over_at_once(pair: Pair) -> None:
    leader = await pair.leader()
    _, slots = await pair.serve()
    stub = pair.stub()
    job = (await stub.CreateJob(pb.CreateJobRequest(request_id="first", job=new_job()))).job.name
    await _until_running(stub.WatchJob(pb.WatchJobRequest(name=job)))
    leader.send(signal.SIGTERM)
    new = pair.stub(pair.other(leader).address)
    await wait_until(lambda: _answers(new), FAIL_OVER_S, what="the other leads")
    assert await leader.ended() == 0
    now = (await new.GetJob(pb.GetJobRequest(name=job))).job
    assert now.state == job_pb2.JOB_STATE_RUNNING
    assert slots.ends == []


async def test_one_that_stands_by_ends_when_it_is_told_to(pair: Pair) -> None:
    standby = pair.other(await pair.leader())
    standby.send(signal.SIGTERM)
    assert await standby.ended() == 0


async def test_the_database_is_away_for_longer_than_every_lease(start_rig: Any) -> None:
    with start_postgres() as server:
        rig = await start_rig(
            database_file=None,
            database_url=server.url(),
            database_password_file=server.password_file,
            leader_lease_s=4.0,
            server_lease_s=6.0,
        )
        job = await rig.create_job()
        running = await rig.until(job.name, job_pb2.JOB_STATE_RUNNING)
        (started,) = await rig.servers()
        server.stop()
        await wait_until(lambda: not_serving(rig.address), what="it steps back")
        with pytest.raises(grpc.RpcError) as refused:
            await rig.jobs.GetJob(pb.GetJobRequest(name=job.name), timeout=30.0)
        assert from_rpc_error(refused.value).reason == Reason.STORAGE_UNAVAILABLE
        await asyncio.sleep(7.0)
        server.start()
        await wait_until(lambda: serving(rig.address), what="it leads again")
        await asyncio.sleep(4.0)
        now = await rig.job(job.name)
        assert (now.state, now.attempt) == (job_pb2.JOB_STATE_RUNNING, running.attempt)
        assert [each.pid for each in await rig.servers()] == [started.pid]
        await rig.stop()


async def serving(address: str) -> bool:
    # In a thread: the server asked runs on this loop.
    return await asyncio.to_thread(is_serving, address)


async def not_serving(address: str) -> bool:
    return not await serving(address)


async def _until_running(watch: Any) -> None:
    async for change in watch:
        if change.job.state == job_pb2.JOB_STATE_RUNNING:
            watch.cancel()
            return
