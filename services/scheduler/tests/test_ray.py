"""A scheduler whose servers are on the nodes of a Ray cluster: real nodes, real processes, a real kill -9."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from services.scheduler.tests.ray_nodes import RayNodes, ray_nodes
from services.scheduler.tests.test_restart import Program

from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAINER, INFERENCE = job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE
RUNNING, STARTING = job_pb2.JOB_STATE_RUNNING, job_pb2.JOB_STATE_STARTING


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes((4, 2), (4, 2)) as cluster:
        yield cluster


@pytest.fixture
def ray_settings(nodes: RayNodes, scheduler_settings: dict[str, Any]) -> dict[str, Any]:
    # Where the nodes reach it: an address of this machine, as theirs is.
    host = nodes.address.partition(":")[0]
    return {
        **scheduler_settings,
        "launcher": "ray",
        "ray_address": nodes.address,
        "listen_host": host,
        "engine_gpus": {"noop": 1},
    }


@pytest.fixture
async def rig(start_rig: Any, ray_settings: dict[str, Any]) -> Any:
    return await start_rig(**ray_settings)


def told(server: job_pb2.Server) -> list[dict[str, Any]]:
    path = Path(server.log_path).parent / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def groups(rig: Any) -> list[str]:
    return sorted(await rig.scheduler.launcher._cluster.groups())


async def test_servers_run_on_the_nodes_with_gpus_of_their_own(
    rig: Any, nodes: RayNodes, make_slot: Any
) -> None:
    job = await rig.create_job(make_slot(TRAINER), make_slot(INFERENCE, count=2))
    job = await rig.until(job.name, RUNNING, timeout_s=60)
    servers = await rig.servers()
    assert len(servers) == 3
    devices: dict[int, list[str]] = {}
    for server in servers:
        assert (server.launcher, server.state) == ("ray", job_pb2.SERVER_STATE_READY)
        folder = Path(server.log_path).parent
        settings = json.loads((folder / "settings.json").read_text())
        # Keys travelled, and are nobody else's business there either.
        key = Path(settings["service_key_file"])
        assert key.parent == folder
        assert key.read_text() == (rig.folder / "service.key").read_text()
        for path in (key, folder / "settings.json"):
            assert path.stat().st_mode & 0o777 == 0o600
        assert settings["listen_host"] == nodes.node_of(server.pid).node_ip_address
        (assigned,) = told(server)
        assert assigned["job"] == job.name
        env = psutil.Process(server.pid).environ()
        assert not [name for name in env if name.startswith("RAY_")]
        assert "OMP_NUM_THREADS" not in env
        node = nodes.nodes.index(nodes.node_of(server.pid))
        devices.setdefault(node, []).append(env["CUDA_VISIBLE_DEVICES"])
    for here in devices.values():
        assert len(set(here)) == len(here)
        assert set(here) <= {"0", "1"}
    assert await groups(rig) == sorted(server.name.removeprefix("servers/") for server in servers)
    # There are four GPUs, and that is what is offered.
    too_much = [make_slot(TRAINER), make_slot(INFERENCE, count=4)]
    with pytest.raises(grpc.RpcError) as caught:
        await rig.create_job(*too_much)
    assert from_rpc_error(caught.value).reason == Reason.CANNOT_BE_SATISFIED
    assert "engine_gpus[noop]=1" in str(caught.value)


async def test_a_restarted_scheduler_goes_on_with_what_runs(
    nodes: RayNodes, ray_settings: dict[str, Any], tmp_path: Path
) -> None:
    with socket.create_server((ray_settings["listen_host"], 0)) as probe:
        port = probe.getsockname()[1]
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in ray_settings.items()}
    model = tmp_path / "models" / "some-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 2048}')
    settings |= {
        "listen_port": port,
        "ready_file": str(tmp_path / "ready.json"),
        "model_roots": [str(model.parent)],
        "stop_servers_on_exit": False,
    }
    program = Program(tmp_path, settings)
    await program.start()
    request = pb.CreateJobRequest(
        request_id="r",
        job=job_pb2.Job(
            kind=job_pb2.JOB_KIND_LORA_RL,
            slots=[
                job_pb2.SlotSpec(
                    role=TRAINER, base_model=str(model), options=job_pb2.ServerOptions(engine="noop")
                )
            ],
        ),
    )
    stub = _stub(program, ray_settings)
    job = (await stub.CreateJob(request)).job

    async def runs() -> bool:
        return (await stub.GetJob(pb.GetJobRequest(name=job.name))).job.state == RUNNING

    await wait_until(runs, 60, what="the job runs")
    (before,) = (await stub.ListServers(pb.ListServersRequest())).servers
    program.kill()
    assert psutil.Process(before.pid).is_running()
    await program.start()
    stub = _stub(program, ray_settings)
    (after,) = (await stub.ListServers(pb.ListServersRequest())).servers
    assert (after.name, after.pid) == (before.name, before.pid)
    assert (await stub.CreateJob(request)).job.name == job.name
    await wait_until(runs, 30, what="the job runs still")
    # It is watched again: its end is noticed long before its lease is over, and it is replaced.
    os.kill(before.pid, 9)

    async def replaced() -> bool:
        servers = (await stub.ListServers(pb.ListServersRequest())).servers
        return len(servers) == 1 and servers[0].pid not in (0, before.pid) and await runs()

    await wait_until(replaced, 30, what="the server is replaced")
    request = pb.CancelJobRequest(name=job.name, request_id="c")
    await stub.CancelJob(request)
    (last,) = (await stub.ListServers(pb.ListServersRequest())).servers
    settings["stop_servers_on_exit"] = True
    program.kill()
    await program.start()
    program.stop()
    assert not psutil.pid_exists(last.pid)


def _stub(program: Program, settings: dict[str, Any]) -> Any:
    from opentinker_kit.settings import read_secret
    from opentinkerapi.runtime.channels import open_channel
    from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

    address = json.loads((program.folder / "ready.json").read_text())["address"]
    return SchedulerServiceStub(open_channel(address, key=read_secret(settings["bootstrap_key_file"])))


async def test_jobs_of_a_lost_node_move_to_another(rig: Any, nodes: RayNodes, make_slot: Any) -> None:
    job = await rig.create_job(make_slot(TRAINER))
    job = await rig.until(job.name, RUNNING, timeout_s=60)
    (server,) = await rig.servers()
    nodes.lose(nodes.node_of(server.pid))
    try:
        await wait_until(lambda: not psutil.pid_exists(server.pid), 10, what="its processes are gone")

        async def moved() -> bool:
            now = await rig.job(job.name)
            return now.state == RUNNING and now.attempt > job.attempt

        # Within its lease (15 s), and then the other server has to start.
        await wait_until(moved, 60, what="the job runs elsewhere")
        (other,) = await rig.servers()
        assert other.pid != server.pid
        assert nodes.node_of(other.pid) in nodes.nodes
    finally:
        nodes.add(4, 2)


async def test_a_full_cluster_says_whom_it_waits_for_and_goes_on_when_a_node_comes(
    start_rig: Any, ray_settings: dict[str, Any], nodes: RayNodes, make_slot: Any
) -> None:
    settings = {**ray_settings, "engine_gpus": {"noop": 3}, "ray_autoscaler": "KubeRay group h100"}
    rig = await start_rig(**settings)
    job = await rig.create_job(make_slot(TRAINER))
    given_up = await rig.create_job(make_slot(TRAINER, model="other-model"))

    async def says() -> bool:
        return "KubeRay group h100 was asked for nodes" in (await rig.job(job.name)).state_reason

    await wait_until(says, 30, what="it says what it waits for")
    reason = (await rig.job(job.name)).state_reason
    assert "1 CPU, 3 GPU free" in reason
    assert (await rig.job(job.name)).state == STARTING
    await wait_until(lambda: _two(rig), 20, what="both ask for room")
    await rig.jobs.CancelJob(pb.CancelJobRequest(name=given_up.name, request_id="c"))

    async def one_asks() -> bool:
        return len(await groups(rig)) == 1

    await wait_until(one_asks, 20, what="nobody asks for the cancelled one")
    node = nodes.add(4, 3)
    try:
        await rig.until(job.name, RUNNING, timeout_s=60)
    finally:
        await rig.stop()
        nodes.lose(node)


async def _two(rig: Any) -> bool:
    return len(await groups(rig)) == 2


async def test_exit_code_and_log_of_a_server_on_a_node_come_back(
    start_rig: Any, ray_settings: dict[str, Any], make_slot: Any
) -> None:
    rig = await start_rig(**ray_settings, behavior="exit:3")
    job = await rig.create_job(make_slot(TRAINER))
    job = await rig.until(job.name, job_pb2.JOB_STATE_FAILED, timeout_s=90)
    assert "exited with code 3; its log ends:\nsomething broke" in job.error.message

    async def nothing_left() -> bool:
        return await groups(rig) == []

    await wait_until(nothing_left, 20, what="what it reserved is free")


def test_nothing_stays_reserved(nodes: RayNodes) -> None:
    """The last one: whatever the others started and lost, their nodes are free."""
    assert nodes.reserved() == []
