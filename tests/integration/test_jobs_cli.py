"""The commands around jobs, against a real scheduler with simulated servers."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from typer.testing import CliRunner

from opentinker.cli.app import app
from opentinker_kit.files import make_key_file
from opentinker_kit.processes import free_port
from opentinker_kit.settings import read_secret
from opentinker_kit.testing.waiting import wait_until
from opentinker_scheduler.bootstrap import Scheduler
from opentinker_scheduler.domain.admission import Model
from opentinker_scheduler.settings import SchedulerSettings
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.run.v1.run_service_pb2_grpc import RunServiceStub
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

Run = Callable[..., Coroutine[Any, Any, Any]]
MODEL = "some-model"
FAKE_SERVERS = Path(__file__).parents[2] / "services" / "scheduler" / "tests"


class OneModel:
    """Knows one model by name and reads no disk."""

    async def resolve(self, model_id: str, field: str) -> Model:
        return Model(model_id, 2048)

    async def known(self) -> list[str]:
        return [MODEL]


def settings_in(folder: Path, **more: Any) -> SchedulerSettings:
    """Of a scheduler that starts one server at most, a simulated one."""
    keys = {f"{name}_key_file": make_key_file(folder / f"{name}.key") for name in ("bootstrap", "service")}
    return SchedulerSettings(
        **keys,
        **more,
        state_dir=folder,
        server_modules={"trainer": "fake_server"},
        server_settings={"trainer": {"server_settings_role": "trainer", "behavior": "normal"}},
        max_servers=1,
        tick_s=0.05,
        stop_grace_s=0.5,
        drain_s=1.0,
    )


@pytest.fixture(autouse=True)
def fake_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_SERVERS), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[str, str]]:
    """Address and bootstrap key of a scheduler."""
    scheduler = Scheduler(settings_in(tmp_path), models=OneModel())
    port = await scheduler.start()
    yield f"127.0.0.1:{port}", read_secret(tmp_path / "bootstrap.key")
    await scheduler.server.drain()
    await scheduler.run()


@pytest.fixture
def run(cluster: tuple[str, str]) -> Run:
    address, key = cluster

    async def command(*words: str) -> Any:
        first, *rest = words
        where = ["--address", address, "--key", key]
        argv = [first, *where, *rest] if first == "jobs" else [first, *rest, *where]
        # In another thread: the scheduler answers on this one's loop.
        return await asyncio.to_thread(CliRunner().invoke, app, argv, env={"COLUMNS": "250"})

    return command


async def test_a_job_from_the_queue_to_its_end(cluster: tuple[str, str], run: Run) -> None:
    address, key = cluster
    async with open_channel(address, key=key) as channel:
        stub, runs = SchedulerServiceStub(channel), RunServiceStub(channel)
        made = await runs.CreateRun(
            run_service_pb2.CreateRunRequest(
                request_id="r", run=run_pb2.Run(display_name="mine", state=run_pb2.RUN_STATE_ACTIVE)
            )
        )

        async def create(name: str, exclusive: bool = False, **fields: Any) -> str:
            slot = job_pb2.SlotSpec(
                role=job_pb2.SLOT_ROLE_TRAINER,
                base_model=MODEL,
                tuning=job_pb2.TUNING_KIND_LORA,
                options=job_pb2.ServerOptions(engine="noop", exclusive=exclusive),
            )
            spec = job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot], display_name=name, **fields)
            answer = await stub.CreateJob(pb.CreateJobRequest(request_id=name, job=spec))
            return str(answer.job.name)

        first = await create("first", exclusive=True, max_duration=Duration(seconds=7200))

        async def runs_now() -> bool:
            found = await stub.GetJob(pb.GetJobRequest(name=first))
            return bool(found.job.state == job_pb2.JOB_STATE_RUNNING)

        await wait_until(runs_now, 60, what="the first job has the only server")
        jobs = [await create(f"number-{number}", run=made.run.name, priority=-number) for number in range(2)]
        listed = await run("jobs")
        assert listed.exit_code == 0, listed.output
        assert all(name in listed.output for name in jobs)

        async def placed() -> bool:
            found = await stub.GetJob(pb.GetJobRequest(name=jobs[1]))
            return bool(found.job.queue_position)

        await wait_until(placed, 20, what="the queue was looked at")
        queued = await run("queue")
        lines = [line for line in queued.output.splitlines() if "number-" in line]
        assert ["number-0" in lines[0], "number-1" in lines[1]] == [True, True], queued.output
        assert "waiting for 1 trainer slot" in queued.output
        assert "in about 11" in lines[0], "when the first one must have ended"
        assert "in about" not in lines[1], "nobody knows how long the next one takes"
        assert "1 slot" in lines[0]
        assert "8 slots, at most 16.00 slot hours" in (await run("jobs")).output
        assert "1/8" in (await run("servers")).output

        row = run_pb2.MetricsRow(step=3, values={"critic/score/mean": 0.25})
        await runs.AppendMetrics(run_service_pb2.AppendMetricsRequest(run=made.run.name, rows=[row]))
        # A process of its own: two commands at once in this one would share its output.
        code = "from opentinker.cli import main; main()"
        following = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "attach", jobs[0], "--address", address, "--key", key),
            stdout=asyncio.subprocess.PIPE,
        )
        assert following.stdout is not None
        first_line = (await following.stdout.readline()).decode()
        assert "queued" in first_line
        cancelled = await run("jobs", "cancel", jobs[0])
        assert "cancelled" in cancelled.output, cancelled.output
        followed = (await following.communicate())[0].decode()
        assert following.returncode == 1, followed
        assert "step 3: reward 0.25" in followed
        assert f"{jobs[0]} number-0: cancelled" in followed

        paused = await run("jobs", "pause", jobs[1].removeprefix("jobs/"))
        assert "paused" in paused.output, paused.output
        assert "nobody waits" in (await run("queue")).output
        assert "queued" in (await run("jobs", "resume", jobs[1])).output
        only = await run("jobs", "--state", "cancelled")
        assert (jobs[0] in only.output, jobs[1] in only.output) == (True, False)


async def test_unknown_states_and_jobs_are_said(run: Run) -> None:
    done = await run("jobs", "--state", "asleep")
    assert "'asleep' is none of queued" in str(done.exception)
    done = await run("attach", "jobs/none")
    assert "jobs/none" in str(done.exception)


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


async def test_logs_are_followed_over_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    port = free_port()
    settings = settings_in(tmp_path, listen_port=port, stop_servers_on_exit=False)
    scheduler = Scheduler(settings, models=OneModel())
    await scheduler.start()
    address, key = f"127.0.0.1:{port}", read_secret(tmp_path / "bootstrap.key")
    where = ("--address", address, "--key", key)
    async with open_channel(address, key=key) as channel:
        stub = SchedulerServiceStub(channel)
        options = job_pb2.ServerOptions(engine="noop")
        slot = job_pb2.SlotSpec(role=job_pb2.SLOT_ROLE_TRAINER, base_model=MODEL, options=options)
        spec = job_pb2.Job(kind=job_pb2.JOB_KIND_LORA_RL, slots=[slot])
        job = (await stub.CreateJob(pb.CreateJobRequest(request_id="j", job=spec))).job.name

        async def shows(*words: str) -> bool:
            shown = await logs()
            return all(word in shown for word in words)

        async def logs(*more: str) -> str:
            argv = ["logs", job.removeprefix("jobs/"), *more, *where]
            done = await asyncio.to_thread(CliRunner().invoke, app, argv)
            assert done.exit_code == 0, done.output
            # What the scheduler in this process logs meanwhile goes to the same place.
            return "".join(line for line in done.output.splitlines(True) if " [" not in line[:24])

        await wait_until(lambda: shows("RUNNING (attempt 1)", "slot ready"), 60, what="it runs")
        (server,) = (await stub.ListServers(pb.ListServersRequest())).servers
        path = Path(server.log_path)
        what = {"event": "a\x1b[2Jstep", "level": "info", "job": job, "loss": 0.5, "note": "so so"}
        write(path, json.dumps({**what, "timestamp": "2099-01-01T01:02:03Z"}), "not about a job")
        (last,) = (await logs("--lines", "1")).splitlines()
        short = server.name.removeprefix("servers/")[:8]
        told = f'info    a\\x1b[2Jstep job={job} loss=0.5 note="so so"'
        assert last == f"2099-01-01 01:02:03 trainer {short}   {told}"
        assert "scheduler          QUEUED" in await logs()
        assert "not about a job" not in await logs()
        assert "not about a job" in await logs("--all", "--server", server.name)

        code = "from opentinker.cli import main; main()"
        following = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, "logs", job, "-f", "--lines", "0", *where),
            stdout=asyncio.subprocess.PIPE,
        )
        assert following.stdout is not None
        seen: list[str] = []
        while not any("step 1" in line for line in seen):
            # Until it follows, it begins behind this.
            write(path, json.dumps({"job": job, "event": "step 1"}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    seen.append((await following.stdout.readline()).decode())
        await scheduler.server.drain()
        await scheduler.run()
        write(path, json.dumps({"job": job, "event": "step 2"}))
        scheduler = Scheduler(settings, models=OneModel())
        await scheduler.start()
        await stub.CancelJob(pb.CancelJobRequest(name=job, request_id="c"), wait_for_ready=True)
        async with asyncio.timeout(40):
            # What the server says of its slot right after the restart is heard, not waited for in vain.
            rest, _ = await following.communicate()
        assert following.returncode == 0
        assert rest.decode().count("step 2") == 1, rest
        assert "CANCELLED" in rest.decode()
        assert "slot released" in rest.decode()
    await scheduler.server.drain()
    await scheduler.run()
