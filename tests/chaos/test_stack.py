"""kill -9 of the embedded stack's surroundings and parts, with servers of a job running in it (B110, B111).

What `services/local/tests` shows of the supervisor alone holds with the real services, and for the processes
that the scheduler started: nothing is left, or what was killed is back and goes on.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from opentinker_kit.testing import build_tiny_qwen3, wait_until_sync
from opentinker_local import StackInfo, attach, start_stack, stop_stack
from opentinkerapi.scheduler.v1 import job_pb2

from .jobs import Jobs, noop_job

pytestmark = pytest.mark.slow

RUNNING = job_pb2.JOB_STATE_RUNNING

OWNER = """
import sys, time
from pathlib import Path
import opentinker as ot
from opentinker.training.tuning import ServerOptions

cluster = ot.connect(state_dir=Path(sys.argv[1]))
noop = ServerOptions(engine="noop")
cluster.create_policy(sys.argv[2], trainer=noop, inference=noop)
print("running", flush=True)
time.sleep(1000)
"""


def tree(pid: int) -> dict[int, float]:
    """Start times of a process and everything below it."""
    process = psutil.Process(pid)
    return {one.pid: one.create_time() for one in (process, *process.children(recursive=True))}


def ports(pids: dict[int, float]) -> set[int]:
    """Ports that these processes listen on."""
    return {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def alive(pid: int, created: float) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    return False


def listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        return True
    return False


def assert_gone_in_10_s(pids: dict[int, float], listened: set[int]) -> None:
    def gone() -> bool:
        return not any(alive(*one) for one in pids.items()) and not any(map(listening, listened))

    wait_until_sync(gone, 10, what="every process and port of the stack is gone")


def kill_part(stack: StackInfo, part: str) -> None:
    """Kill one of the supervisor's children and return when it is back."""
    pid = attach(stack.state_dir).pids[part]
    os.kill(pid, signal.SIGKILL)
    wait_until_sync(lambda: attach(stack.state_dir).pids.get(part, pid) != pid, 30, what=f"{part} is back")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackInfo]:
    """A stack that survives what the tests do to its parts."""
    directory = tmp_path_factory.mktemp("stack")
    yield start_stack(directory, owned=False)
    stop_stack(directory)


@pytest.fixture(scope="module")
def running(stack: StackInfo, tiny_model_dir: Path) -> Iterator[tuple[Jobs, str]]:
    """A job that runs in it, on a trainer and an inference server."""
    with running_job(stack, tiny_model_dir) as job:
        yield job


@contextlib.contextmanager
def running_job(stack: StackInfo, model: Path) -> Iterator[tuple[Jobs, str]]:
    jobs = Jobs(stack)
    name = jobs.create(noop_job(model))
    jobs.await_state([name], RUNNING, 60)
    yield jobs, name
    jobs.close()


def test_b110_killed_supervisor(tmp_path: Path, tiny_model_dir: Path) -> None:
    stack = start_stack(tmp_path / "stack", owned=False)
    with running_job(stack, tiny_model_dir) as (jobs, _):
        servers = jobs.servers()
        pids = tree(stack.supervisor_pid)
        listened = ports(pids)
        assert {server.pid for server in servers} <= set(pids)
        assert len(servers) == 2
        os.kill(stack.supervisor_pid, signal.SIGKILL)
        assert_gone_in_10_s(pids, listened)


def test_b110_killed_client(tmp_path: Path, tiny_model_dir: Path) -> None:
    argv = [sys.executable, "-c", OWNER, str(tmp_path / "stack"), str(tiny_model_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "running\n"
        pids = tree(attach(tmp_path / "stack").supervisor_pid)
        listened = ports(pids)
        owner.kill()
        owner.wait()
    assert_gone_in_10_s(pids, listened)


def test_b110_killed_scheduler_adopts_what_runs(stack: StackInfo, running: tuple[Jobs, str]) -> None:
    jobs, name = running
    before = {server.name: (server.pid, server.address) for server in jobs.servers()}
    attempt = jobs.get(name).attempt
    kill_part(stack, "scheduler")
    jobs.await_state([name], RUNNING, 30)
    assert {server.name: (server.pid, server.address) for server in jobs.servers()} == before
    assert jobs.get(name).attempt == attempt
    assert attach(stack.state_dir).scheduler == stack.scheduler


def test_b110_killed_server_is_replaced_and_leaves_no_orphan(
    stack: StackInfo, running: tuple[Jobs, str]
) -> None:
    jobs, name = running
    victim = next(server for server in jobs.servers() if server.role == job_pb2.SLOT_ROLE_TRAINER)
    below = tree(victim.pid)
    attempt = jobs.get(name).attempt
    os.kill(victim.pid, signal.SIGKILL)
    assert_gone_in_10_s(below, set())
    wait_until_sync(lambda: jobs.get(name).attempt > attempt, 30)
    jobs.await_state([name], RUNNING, 60)
    assert {server.pid for server in jobs.servers()} <= set(tree(stack.supervisor_pid))


@pytest.mark.parametrize("part", ["nats", "s3", "env_host"])
def test_killed_parts_come_back_under_a_running_job(
    part: str, stack: StackInfo, running: tuple[Jobs, str]
) -> None:
    jobs, name = running
    kill_part(stack, part)
    now = attach(stack.state_dir)
    assert (now.scheduler, now.env_host, now.nats, now.s3) == (
        stack.scheduler,
        stack.env_host,
        stack.nats,
        stack.s3,
    )
    assert jobs.get(name).state == RUNNING


def test_b111_five_stacks_at_once_each_with_a_job(tmp_path: Path, tiny_model_dir: Path) -> None:
    directories = [tmp_path / f"stack-{index}" for index in range(5)]

    def use(directory: Path) -> set[int]:
        info = start_stack(directory, timeout_s=180)
        jobs = Jobs(info)
        jobs.await_state([jobs.create(noop_job(tiny_model_dir))], RUNNING, 120)
        jobs.close()
        return ports(tree(info.supervisor_pid))

    try:
        with ThreadPoolExecutor(5) as pool:
            used = list(pool.map(use, directories))
        assert sum(map(len, used)) == len(set().union(*used)), "two stacks share a port"
    finally:
        for directory in directories:
            stop_stack(directory)


@pytest.mark.timeout(300)
def test_b111_twenty_jobs_at_once(stack: StackInfo, tmp_path: Path) -> None:
    """Over five models, so that ten servers start at the same moment."""
    models = [build_tiny_qwen3(tmp_path / f"model-{seed}", seed) for seed in range(5)]
    jobs = Jobs(stack)
    with ThreadPoolExecutor(20) as pool:
        names = list(pool.map(lambda index: jobs.create(noop_job(models[index % 5])), range(20)))
    jobs.await_state(names, RUNNING, 240)
    servers = [server for server in jobs.servers() if server.base_model in map(str, models)]
    assert len(servers) >= 10
    assert len({server.address for server in servers}) == len(servers)
    for server in servers:
        log = Path(server.log_path).read_text()
        assert "EADDRINUSE" not in log
        assert "cannot listen" not in log
    jobs.close()
