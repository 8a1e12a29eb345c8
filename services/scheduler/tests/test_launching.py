"""Jobs over real server processes: started on demand, watched, restarted, ended."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from opentinker_kit.testing import wait_until
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb

TRAINER, INFERENCE = job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE
RUNNING, STARTING = job_pb2.JOB_STATE_RUNNING, job_pb2.JOB_STATE_STARTING


def child_pid(rig: Any, server: job_pb2.Server) -> int:
    """The process that a fake server started, as a front starts its engine."""
    folder: Path = rig.folder / "servers" / server.name.removeprefix("servers/")
    return int((folder / "child.pid").read_text())


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_job_gets_servers_and_runs(rig: Any, make_slot: Any) -> None:
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE))
    assert (job.state, job.attempt) == (job_pb2.JOB_STATE_QUEUED, 0)
    job = await rig.until(job.name, RUNNING)
    assert job.attempt == 1
    assert job.HasField("start_time")
    lease = await rig.renew(job.name)
    assert {(e.role, e.slot_index, e.attempt) for e in lease.endpoints} == {
        (TRAINER, 0, 1),
        (INFERENCE, 1, 1),
    }
    assert lease.job_token
    servers = await rig.servers()
    assert {server.state for server in servers} == {job_pb2.SERVER_STATE_READY}
    assert {e.address for e in lease.endpoints} == {server.address for server in servers}
    assert all(server.slots_used == 1 and server.launcher == "process" for server in servers)
    for server in servers:
        (told,) = rig.told(server)
        assert (told["job"], told["attempt"], told["policies"]) == (job.name, 1, [])
        settings = Path(server.log_path).parent / "settings.json"
        assert settings.stat().st_mode & 0o777 == 0o600
        assert os.getsid(server.pid) == server.pid


async def test_finishing_frees_the_slots(rig: Any, make_slot: Any) -> None:
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    request = pb.FinishJobRequest(
        name=job.name, request_id="f", outcome=job_pb2.JOB_STATE_SUCCEEDED, message="done"
    )
    first = await rig.jobs.FinishJob(request)
    assert first.job.state == job_pb2.JOB_STATE_SUCCEEDED
    assert await rig.jobs.FinishJob(request) == first
    (server,) = await rig.servers()
    await wait_until(lambda: any("release" in told for told in rig.told(server)))
    # The server stays for the next one.
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (same,) = await rig.servers()
    assert same.pid == server.pid


@pytest.mark.parametrize("role", [TRAINER, INFERENCE])
async def test_a_killed_server_is_replaced_at_once(rig: Any, make_slot: Any, role: int) -> None:
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE))
    job = await rig.until(job.name, RUNNING)
    before = {e.role: e for e in (await rig.renew(job.name)).endpoints}
    victim = next(server for server in await rig.servers() if server.role == role)
    engine = child_pid(rig, victim)
    start = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    job = await rig.until(job.name, STARTING, timeout_s=2.0)
    assert time.monotonic() - start < 2.0
    assert "was killed by signal 9" in job.state_reason
    assert job.attempt == 2
    await wait_until(lambda: not alive(engine), what="the engine of the dead server is gone")
    job = await rig.until(job.name, RUNNING)
    after = {e.role: e for e in (await rig.renew(job.name)).endpoints}
    other = INFERENCE if role == TRAINER else TRAINER
    assert after[role].attempt == 2
    assert after[role].server != before[role].server
    # Who did not die is not disturbed.
    assert after[other] == before[other]


async def test_a_killed_replica_is_replaced_while_its_job_runs_on(rig: Any, make_slot: Any) -> None:
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE, count=2))
    job = await rig.until(job.name, RUNNING)
    before = await replicas(rig, job.name)
    assert len({e.server for e in before}) == len({e.address for e in before}) == 2
    victim, survivor = before
    states: list[int] = []

    async def watch() -> None:
        async for seen in rig.jobs.WatchJob(pb.WatchJobRequest(name=job.name)):
            states.append(seen.job.state)

    watching = asyncio.ensure_future(watch())
    os.kill(await pid_of(rig, victim.server), signal.SIGKILL)
    await wait_until(
        lambda: _are_replicas(rig, job.name, {survivor.server}), what="the dead one is not named"
    )
    lost = await rig.job(job.name)
    assert lost.attempt == 2
    assert "was killed by signal 9" in lost.state_reason
    await wait_until(lambda: _count_replicas(rig, job.name, 2), what="there are two again")
    after = {e.server: e for e in await replicas(rig, job.name)}
    # Who did not die is not disturbed; who came is under a new attempt.
    assert after.pop(survivor.server) == survivor
    (new,) = after.values()
    assert (new.attempt, new.slot_index) == (2, victim.slot_index)
    whole = await rig.job(job.name)
    assert (whole.state, whole.state_reason) == (RUNNING, "")
    watching.cancel()
    assert set(states) == {RUNNING}


async def test_a_job_that_loses_all_replicas_starts_again_with_the_first(rig: Any, make_slot: Any) -> None:
    job = await rig.create_job(make_slot(INFERENCE, count=2), kind=job_pb2.JOB_KIND_INFERENCE)
    await rig.until(job.name, RUNNING)
    for server in await rig.servers():
        os.kill(server.pid, signal.SIGKILL)
    await rig.until(job.name, STARTING)
    await rig.until(job.name, RUNNING)
    await wait_until(lambda: _count_replicas(rig, job.name, 2), what="there are two again")


async def test_replicas_that_die_again_and_again_are_given_up_for_a_while(
    start_rig: Any, make_slot: Any
) -> None:
    rig = await start_rig(crash_limit=2, crash_window_s=6.0)
    job = await rig.create_job(make_slot(INFERENCE, count=2), kind=job_pb2.JOB_KIND_INFERENCE)
    job = await rig.until(job.name, RUNNING)
    survivor = (await replicas(rig, job.name))[0].server
    for _ in range(2):
        await wait_until(lambda: _count_replicas(rig, job.name, 2), what="there are two")
        (victim,) = (e.server for e in await replicas(rig, job.name) if e.server != survivor)
        os.kill(await pid_of(rig, victim), signal.SIGKILL)
        await wait_until(lambda: _are_replicas(rig, job.name, {survivor}), what="one is left")

    async def given_up() -> bool:
        return "going on without a replica: 2 crashes" in (await rig.job(job.name)).state_reason

    await wait_until(given_up, what="the job says so")
    assert (await rig.job(job.name)).state == RUNNING
    # Once the crashes are long ago, it is tried again.
    await wait_until(lambda: _count_replicas(rig, job.name, 2), 30.0, what="there are two again")


async def replicas(rig: Any, job: str) -> list[job_pb2.Endpoint]:
    return [e for e in (await rig.renew(job)).endpoints if e.role == INFERENCE]


async def pid_of(rig: Any, server: str) -> int:
    return next(one.pid for one in await rig.servers() if one.name == server)


async def _are_replicas(rig: Any, job: str, servers: set[str]) -> bool:
    return {e.server for e in await replicas(rig, job)} == servers


async def _count_replicas(rig: Any, job: str, number: int) -> bool:
    return len(await replicas(rig, job)) == number


@pytest.mark.parametrize("code", [0, 1])
async def test_a_server_that_ends_unasked_costs_the_job_its_crashes(start_rig: Any, code: int) -> None:
    """B109: a dead component is noticed whatever its exit code. B107: the job fails with the cause."""
    rig = await start_rig(behavior=f"exit_ready:{code}", crash_limit=2)
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert f"exited with code {code}" in job.error.message
    assert "it broke later" in job.error.message
    assert "crash 2 of 2" in job.error.message
    await wait_until(lambda: _no_servers(rig), what="no server is left")


async def _no_servers(rig: Any) -> bool:
    return not await rig.servers()


async def test_a_server_that_cannot_start_fails_the_job_with_its_log(start_rig: Any) -> None:
    rig = await start_rig(behavior="exit:3")
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert "exited with code 3" in job.error.message
    assert "something broke" in job.error.message
    ended = await rig.servers(include_ended=True)
    assert len(ended) == 3
    assert {server.state for server in ended} == {job_pb2.SERVER_STATE_LOST}


async def test_a_server_that_says_it_cannot_load(start_rig: Any) -> None:
    rig = await start_rig(behavior="failure:no such weights", crash_limit=1)
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert "no such weights" in job.error.message
    await wait_until(lambda: not rig.scheduler.launcher.watched(), what="its process is gone")


@pytest.mark.parametrize(
    ("behavior", "setting", "says"),
    [
        ("silent", "register_timeout_s", "did not register"),
        ("never_ready", "ready_timeout_s", "did not load its model"),
    ],
)
async def test_a_server_that_takes_too_long(start_rig: Any, behavior: str, setting: str, says: str) -> None:
    rig = await start_rig(behavior=behavior, crash_limit=1, **{setting: 2.5})
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert says in job.error.message
    await wait_until(lambda: not rig.scheduler.launcher.watched(), what="its process is gone")


async def test_an_assignment_that_fails_fails_the_job(start_rig: Any) -> None:
    rig = await start_rig(behavior="refuse", crash_limit=2)
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert "the policy cannot be restored" in job.error.message


async def test_a_server_that_hangs_loses_its_lease(start_rig: Any) -> None:
    rig = await start_rig(server_lease_s=1.0)
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    os.kill(server.pid, signal.SIGSTOP)
    job = await rig.until(job.name, STARTING, timeout_s=5.0)
    assert "did not renew its lease for 1 s" in job.state_reason
    await rig.until(job.name, RUNNING)
    assert not alive(server.pid)


async def test_a_program_that_does_not_exist(start_rig: Any) -> None:
    rig = await start_rig(python="/nowhere/python", crash_limit=2)
    job = await rig.create_job()
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED)
    assert "could not be started" in job.error.message


async def test_idle_servers_are_stopped(start_rig: Any) -> None:
    rig = await start_rig(idle_stop_s=0.5)
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    await asyncio.sleep(1.0)
    assert len(await rig.servers()) == 1
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    await wait_until(lambda: _no_servers(rig), what="the idle server is gone")
    assert not alive(server.pid)
    (ended,) = await rig.servers(include_ended=True)
    assert ended.state == job_pb2.SERVER_STATE_STOPPED


async def test_an_idle_server_makes_room_for_another_kind(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(max_servers=1)
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id="c"))
    job = await rig.create_job(make_slot(model="other-model"))
    await rig.until(job.name, RUNNING)


async def test_a_large_job_does_not_block_a_small_one(start_rig: Any, make_slot: Any) -> None:
    """B98, through the whole service."""
    rig = await start_rig(max_servers=1, trainer_slots=8)
    first = await rig.create_job()
    await rig.until(first.name, RUNNING)
    large = await rig.create_job(make_slot(count=8))
    small = await rig.create_job()
    await rig.until(small.name, RUNNING)
    large = await rig.job(large.name)
    assert (large.state, large.queue_position) == (job_pb2.JOB_STATE_QUEUED, 1)
    assert "waiting for 8 trainer slots" in large.state_reason
    for number, job in enumerate((first, small)):
        await rig.jobs.CancelJob(pb.CancelJobRequest(name=job.name, request_id=f"c{number}"))
    await rig.until(large.name, RUNNING)
    assert len((await rig.renew(large.name)).endpoints) == 8


async def test_twenty_jobs_at_once(rig: Any, make_slot: Any) -> None:
    """B111: all get their slots; servers are shared and nobody collides."""
    jobs = await asyncio.gather(
        *(rig.create_job(make_slot(TRAINER), make_slot(INFERENCE)) for _ in range(20))
    )
    assert len({job.name for job in jobs}) == 20
    await asyncio.gather(*(rig.until(job.name, RUNNING, timeout_s=60.0) for job in jobs))
    servers = await rig.servers()
    assert len(servers) == 6
    assert sum(server.slots_used for server in servers) == 40


async def test_a_stop_right_after_a_start_leaves_no_process(start_rig: Any) -> None:
    rig = await start_rig(behavior="silent")
    await rig.create_job()
    await wait_until(lambda: (rig.folder / "servers").exists())
    await rig.stop()
    left = [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if str(rig.folder) in " ".join(p.info["cmdline"] or ())
    ]
    assert not left


async def test_an_orderly_stop_pauses_jobs_and_leaves_no_process(start_rig: Any) -> None:
    rig = await start_rig()
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    engine = child_pid(rig, server)
    await rig.stop()
    assert not alive(server.pid)
    await wait_until(lambda: not alive(engine))
    rig = await start_rig()
    job = await rig.job(job.name)
    assert job.state == job_pb2.JOB_STATE_PAUSED
    assert "cluster was stopped" in job.state_reason
    await rig.jobs.ResumeJob(pb.ResumeJobRequest(name=job.name, request_id="r"))
    job = await rig.until(job.name, RUNNING)
    assert job.attempt == 2
