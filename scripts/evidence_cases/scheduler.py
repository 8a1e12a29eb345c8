"""A scheduler that is killed with 1,000 jobs running has them all again within 5 s of its start; of two on
PostgreSQL the other one answers within 20 s of kill -9 of the leader, under load, and nothing acknowledged is
lost; a server that stands still is given up within its lease of 15 s.

Schedulers are processes; the 125 servers of the first part register themselves from this one, as trainers do.
"""

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from services.scheduler.tests.test_failover import MODEL, Load, Replica, Slots, all_jobs, new_job

from opentinker_kit.files import make_key_file
from opentinker_kit.processes import free_port
from opentinker_kit.registration import Announcement, Registration
from opentinker_kit.settings import ServerSettings, read_secret
from opentinker_kit.testing import start_postgres
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[2]
SERVERS, SLOTS = 125, 8
CHANNELS_WAIT_S = 120.0
CLIENTS = 4
KILLS = 5
RESTART_S, FAILOVER_S, LEASE_S = 5.0, 20.0, 15.0


class Stage:
    """Scheduler processes of one cluster, and a client."""

    def __init__(self, folder: Path, count: int, **settings: Any) -> None:
        self.keys = {
            f"{name}_key_file": make_key_file(folder / f"{name}.key") for name in ("bootstrap", "service")
        }
        tokens = make_key_file(folder / "job_tokens.key")
        shared = {key: str(path) for key, path in self.keys.items()} | {
            "job_token_key_file": str(tokens),
            "default_tenant": {"max_jobs": None},
            "reuse_port": True,
            **settings,
        }
        self.replicas = [
            Replica(
                folder / f"s{n}", shared | {"listen_port": free_port(), "state_dir": str(folder / f"s{n}")}
            )
            for n in range(count)
        ]
        addresses = ",".join(replica.address for replica in self.replicas)
        self.addresses = addresses
        self._channel = open_channel(addresses, key=read_secret(self.keys["bootstrap_key_file"]))
        self.stub: Any = SchedulerServiceStub(self._channel)

    async def answers(self) -> bool:
        try:
            await self.stub.GetCluster(pb.GetClusterRequest(), timeout=1.0)
        except Exception:
            return False
        return True

    def register(self, name: str) -> Registration:
        settings = ServerSettings(
            scheduler_address=self.addresses, service_key_file=self.keys["service_key_file"]
        )
        announcement = Announcement(
            role=job_pb2.SLOT_ROLE_TRAINER,
            base_model=MODEL,
            base_digest="d" * 64,
            options=job_pb2.ServerOptions(engine="noop"),
            slots=SLOTS,
            advertise_address="127.0.0.1:1",
            pid=os.getpid(),
            server_id=name,
        )
        registration = Registration(settings, announcement, Slots(), on_lost=lambda: None)
        registration.start()
        registration.set_ready()
        return registration

    async def running(self) -> dict[str, int]:
        """Attempts of the jobs that run, by name."""
        found: dict[str, int] = {}
        token = ""
        while True:
            page = await self.stub.ListJobs(
                pb.ListJobsRequest(page_size=1000, page_token=token), timeout=10.0
            )
            found |= {job.name: job.attempt for job in page.jobs if job.state == job_pb2.JOB_STATE_RUNNING}
            token = page.next_page_token
            if not token:
                return found

    async def close(self) -> None:
        await self._channel.close()
        for replica in self.replicas:
            if replica.process is not None and replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()


async def until(condition: Callable[[], Awaitable[bool]], since: float, what: str) -> float:
    """Seconds since a moment until something holds."""
    deadline = time.monotonic() + CHANNELS_WAIT_S
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {CHANNELS_WAIT_S:.0f} s still not: {what}")
        await asyncio.sleep(0.02)
    return time.perf_counter() - since


async def restart(folder: Path) -> dict[str, Any]:
    """Kill a scheduler whose jobs run, start it again, and wait until all is as it was."""
    stage = Stage(folder, 1, launcher="static")
    (replica,) = stage.replicas
    replica.start()
    await until(stage.answers, time.perf_counter(), "it serves")
    registrations = [stage.register(f"trainer-{number}") for number in range(SERVERS)]
    try:
        await asyncio.gather(
            *(
                stage.stub.CreateJob(pb.CreateJobRequest(request_id=f"job-{n}", job=new_job()))
                for n in range(SERVERS * SLOTS)
            )
        )

        async def all_run() -> bool:
            return len(await stage.running()) == SERVERS * SLOTS

        await until(all_run, time.perf_counter(), "all run")
        before = await stage.running()
        serves: list[float] = []
        whole: list[float] = []
        for _ in range(KILLS):
            replica.send(signal.SIGKILL)
            await replica.ended()
            replica.start()
            started = time.perf_counter()
            serves.append(await until(stage.answers, started, "it serves again"))

            async def as_before() -> bool:
                held = all(registration.holds_lease() for registration in registrations)
                return held and await stage.running() == before

            whole.append(await until(as_before, started, "every server is back"))
            await asyncio.sleep(1.0)
        return {
            "jobs": len(before),
            "servers": SERVERS,
            "serves_s": _spread(serves),
            "whole_s": _spread(whole),
        }
    finally:
        await asyncio.gather(*(registration.stop() for registration in registrations))
        await stage.close()


async def failover(folder: Path) -> dict[str, Any]:
    """Kill the leader of two again and again while clients create jobs."""
    with start_postgres() as server:
        stage = Stage(
            folder,
            2,
            launcher="static",
            database_url=server.url(server.make_database()),
            database_password_file=str(server.password_file),
        )
        leader, other = stage.replicas
        load = Load(stage.stub)
        clients: list[asyncio.Task[None]] = []
        took: list[float] = []
        try:
            leader.start()
            await until(stage.answers, time.perf_counter(), "the first leads")
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            for _ in range(KILLS):
                other.start()
                # Until it stands by, and has work to lose.
                await asyncio.sleep(6.0)
                leader.send(signal.SIGKILL)
                killed, known = time.perf_counter(), len(load.acknowledged)
                await leader.ended()

                async def created(known: int = known) -> bool:
                    return len(load.acknowledged) > known + CLIENTS

                took.append(await until(created, killed, "the other takes jobs"))
                leader, other = other, leader
            load.stopped = True
            await asyncio.gather(*clients)
            names = await all_jobs(stage.stub)
            lost = set(load.acknowledged.values()) - names
            return {"acknowledged": len(load.acknowledged), "lost": len(lost), "failover_s": _spread(took)}
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            await stage.close()


async def dead_server(folder: Path) -> dict[str, Any]:
    """Stop a started server's process (SIGSTOP), and wait until it is given up and its job runs elsewhere."""
    model = folder / "models" / MODEL
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 2048}')
    stage = Stage(
        folder,
        1,
        server_modules={"trainer": "fake_server", "inference": "fake_server"},
        server_settings={"trainer": {"server_settings_role": "trainer", "behavior": "normal"}},
        model_roots=[str(model.parent)],
    )
    (replica,) = stage.replicas
    replica.start()
    noticed: list[float] = []
    moved: list[float] = []
    try:
        await until(stage.answers, time.perf_counter(), "it serves")
        for number in range(3):
            # Each its own: a job whose servers die again and again fails.
            request = pb.CreateJobRequest(request_id=f"job-{number}", job=new_job())
            job = (await stage.stub.CreateJob(request)).job.name

            async def runs(job: str = job) -> bool:
                return job in await stage.running()

            await until(runs, time.perf_counter(), "the job runs")
            (server,) = (await stage.stub.ListServers(pb.ListServersRequest())).servers
            os.kill(server.pid, signal.SIGSTOP)
            stopped = time.perf_counter()

            async def given_up(name: str = server.name) -> bool:
                servers = (await stage.stub.ListServers(pb.ListServersRequest())).servers
                return name not in {each.name for each in servers}

            noticed.append(await until(given_up, stopped, "it is given up"))
            moved.append(await until(runs, stopped, "the job runs elsewhere"))
            await stage.stub.CancelJob(pb.CancelJobRequest(name=job, request_id=f"cancel-{number}"))
        return {"noticed_s": _spread(noticed), "job_runs_again_s": _spread(moved)}
    finally:
        replica.send(signal.SIGTERM)
        await replica.ended()
        await stage.close()


def _spread(values: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(values), 2),
        "max": round(max(values), 2),
        "each": [round(value, 2) for value in values],
    }


def _part(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(PARTS[name](Path(folder)))


def run(progress: Progress) -> dict[str, Any]:
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "services" / "scheduler" / "tests"), os.environ.get("PYTHONPATH", "")]
    )

    found = {name: progress.part(name, partial(_part, name)) for name in PARTS}
    within = (
        found["restart"]["whole_s"]["max"] <= RESTART_S
        and found["failover"]["failover_s"]["max"] <= FAILOVER_S
        and found["failover"]["lost"] == 0
        # A tick may pass between the end of the lease and the look at it.
        and found["dead_server"]["noticed_s"]["max"] <= LEASE_S + 1.0
    )
    return {
        **found,
        "bound": f"restart {RESTART_S:g} s, fail-over {FAILOVER_S:g} s, lease {LEASE_S:g} s and a tick",
        "within": within,
    }


PARTS: dict[str, Callable[[Path], Coroutine[Any, Any, dict[str, Any]]]] = {
    "restart": restart,
    "failover": failover,
    "dead_server": dead_server,
}
