"""A scheduler killed with -9: what it acknowledged is there, what ran goes on, what died is noticed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from opentinker_kit.files import write_json
from opentinker_kit.processes import free_port
from opentinker_kit.settings import read_secret
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

RUNNING = job_pb2.JOB_STATE_RUNNING


@dataclass
class Program:
    """`python -m opentinker_scheduler` in a process of its own, always at the same port."""

    folder: Path
    settings: dict[str, Any]
    pass_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    channel: grpc.aio.Channel | None = None

    async def start(self) -> None:
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        write_json(self.folder / "scheduler.json", self.settings, mode=0o600)
        argv = [
            sys.executable,
            "-m",
            "opentinker_scheduler",
            "--settings",
            str(self.folder / "scheduler.json"),
        ]
        self.process = _spawn(argv, self.folder / "scheduler.log", self.pass_fds)
        await wait_until(ready.exists, 20.0, what="the scheduler is ready")
        assert json.loads(ready.read_text())["pid"] == self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(10.0)

    def stub(self) -> Any:
        if self.channel is None:
            key = read_secret(self.folder / "bootstrap.key")
            self.channel = open_channel(f"127.0.0.1:{self.settings['listen_port']}", key=key)
        return SchedulerServiceStub(self.channel)


def _spawn(argv: list[str], log_path: Path, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, pass_fds=pass_fds)


@pytest.fixture
async def program(
    tmp_path: Path, scheduler_settings: dict[str, Any], tiny_model_dir: Path
) -> AsyncIterator[Program]:
    settings = {
        **{
            key: str(value) if isinstance(value, Path) else value for key, value in scheduler_settings.items()
        },
        "listen_port": free_port(),
        "reuse_port": True,
        "ready_file": str(tmp_path / "ready.json"),
        "model_roots": [str(tiny_model_dir.parent)],
    }
    running = Program(tmp_path, settings)
    await running.start()
    yield running
    if running.channel is not None:
        await running.channel.close()
    if running.process is not None and running.process.poll() is None:
        running.stop()


Job = Callable[[], Awaitable[job_pb2.Job]]


async def create(program: Program, model: str, request_id: str = "r1") -> job_pb2.Job:
    options = job_pb2.ServerOptions(engine="noop")
    job = job_pb2.Job(
        kind=job_pb2.JOB_KIND_LORA_RL,
        slots=[
            job_pb2.SlotSpec(role=role, base_model=model, options=options)
            for role in (job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE)
        ],
    )
    response = await program.stub().CreateJob(pb.CreateJobRequest(request_id=request_id, job=job))
    made: job_pb2.Job = response.job
    return made


async def until(program: Program, name: str, state: int) -> job_pb2.Job:
    stub, found = program.stub(), job_pb2.Job()

    async def there() -> bool:
        found.CopyFrom((await stub.GetJob(pb.GetJobRequest(name=name))).job)
        return found.state == state

    await wait_until(there, 20.0, what=f"{name} in {job_pb2.JobState.Name(state)}")  # type: ignore[arg-type]
    return found


async def servers(program: Program) -> dict[int, job_pb2.Server]:
    found = (await program.stub().ListServers(pb.ListServersRequest())).servers
    return {server.pid: server for server in found}


async def test_what_runs_is_adopted(program: Program, tiny_model_dir: Path) -> None:
    job = await create(program, tiny_model_dir.name)
    job = await until(program, job.name, RUNNING)
    lease = await program.stub().RenewJobLease(pb.RenewJobLeaseRequest(name=job.name))
    before = await servers(program)
    program.kill()
    await asyncio.sleep(0.5)
    assert all(psutil.pid_exists(pid) for pid in before)
    await program.start()
    after = await until(program, job.name, RUNNING)
    assert after.attempt == job.attempt
    again = await program.stub().RenewJobLease(pb.RenewJobLeaseRequest(name=job.name))
    assert list(again.endpoints) == list(lease.endpoints)
    assert set(await servers(program)) == set(before)
    # A request that was answered before is answered the same.
    assert (await create(program, tiny_model_dir.name)).name == job.name
    # Servers adopted are watched like those started.
    victim = next(pid for pid, server in before.items() if server.role == job_pb2.SLOT_ROLE_TRAINER)
    os.kill(victim, signal.SIGKILL)
    restarting = await until(program, job.name, job_pb2.JOB_STATE_STARTING)
    assert restarting.attempt == job.attempt + 1
    await until(program, job.name, RUNNING)


@pytest.mark.slow
async def test_what_died_meanwhile_is_started_again_once_its_client_asks(
    program: Program, tiny_model_dir: Path
) -> None:
    job = await create(program, tiny_model_dir.name)
    await until(program, job.name, RUNNING)
    before = await servers(program)
    program.kill()
    for pid in before:
        os.killpg(pid, signal.SIGKILL)
    await program.start()
    waiting = await until(program, job.name, job_pb2.JOB_STATE_STARTING)
    await asyncio.sleep(0.5)
    waiting = (await program.stub().GetJob(pb.GetJobRequest(name=job.name))).job
    assert "waiting for its client" in waiting.state_reason
    assert not await servers(program)
    watch = program.stub().WatchJob(pb.WatchJobRequest(name=job.name))
    async for change in watch:
        if change.job.state == RUNNING:
            break
    assert set(await servers(program)).isdisjoint(before)
    watch.cancel()


@pytest.mark.slow
async def test_queued_work_survives(program: Program, tiny_model_dir: Path) -> None:
    jobs = [await create(program, tiny_model_dir.name, f"r{i}") for i in range(3)]
    program.kill()
    await program.start()
    for job in jobs:
        await program.stub().RenewJobLease(pb.RenewJobLeaseRequest(name=job.name))
    for job in jobs:
        await until(program, job.name, RUNNING)


@pytest.mark.slow
async def test_processes_that_no_record_claims_are_ended(program: Program, tiny_model_dir: Path) -> None:
    job = await create(program, tiny_model_dir.name)
    await until(program, job.name, RUNNING)
    before = await servers(program)
    program.kill()
    for name in ("scheduler.db", "scheduler.db-wal", "scheduler.db-shm"):
        (program.folder / name).unlink(missing_ok=True)
    await program.start()
    await wait_until(lambda: not any(_running(pid) for pid in before), what="the orphans are gone")


async def test_sigterm_leaves_nothing(program: Program, tiny_model_dir: Path) -> None:
    job = await create(program, tiny_model_dir.name)
    await until(program, job.name, RUNNING)
    before = await servers(program)
    assert program.stop() == 0
    assert not any(_running(pid) for pid in before)


@pytest.mark.slow
async def test_a_second_scheduler_takes_over(program: Program, tiny_model_dir: Path) -> None:
    first = program.process
    await program.start()
    assert first is not None
    assert await asyncio.to_thread(first.wait, 10.0) == 75
    job = await create(program, tiny_model_dir.name)
    await until(program, job.name, RUNNING)


async def test_the_end_of_the_lifeline_ends_scheduler_and_servers(
    program: Program, tiny_model_dir: Path
) -> None:
    assert program.stop() == 0
    reader, writer = os.pipe()
    program.pass_fds, program.settings["lifeline_fd"] = (reader,), reader
    await program.start()
    os.close(reader)
    job = await create(program, tiny_model_dir.name)
    await until(program, job.name, RUNNING)
    pids = list(await servers(program))
    assert program.process is not None
    os.close(writer)
    await wait_until(lambda: not any(_running(pid) for pid in pids), what="the servers are gone")
    assert await asyncio.to_thread(program.process.wait, 10.0) == 0


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
