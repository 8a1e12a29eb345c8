"""GPUs and servers that are kept ready, through the whole service, with real processes."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError
from services.scheduler.tests.asking import cancel, refused, says

from opentinker_kit.errors import ServiceError
from opentinker_kit.testing import wait_until
from opentinker_scheduler.adapters.gpus import find_gpus, this_node
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.settings import SchedulerSettings
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2

TRAINER, INFERENCE = job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE
QUEUED, RUNNING = job_pb2.JOB_STATE_QUEUED, job_pb2.JOB_STATE_RUNNING
READY = job_pb2.SERVER_STATE_READY
FOUR = {"gpus": ["0", "1", "2", "3"], "engine_gpus": {"noop": 1}, "trainer_slots": 1, "inference_slots": 1}


def seen_by(rig: Any, server: job_pb2.Server) -> dict[str, str | None]:
    """What the environment of a server's process says of GPUs."""
    path: Path = rig.folder / "servers" / server.name.removeprefix("servers/") / "gpus.json"
    seen: dict[str, str | None] = json.loads(path.read_text())
    return seen


def visible(rig: Any, server: job_pb2.Server) -> list[str]:
    seen = seen_by(rig, server)
    named = seen["CUDA_VISIBLE_DEVICES"]
    assert named == seen["HIP_VISIBLE_DEVICES"]
    assert named is not None
    return named.split(",")


def ids(server: job_pb2.Server) -> list[str]:
    return [device.rpartition("/")[2] for device in server.devices]


async def test_each_process_sees_gpus_of_its_own_and_they_come_back(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(**FOUR)
    jobs = [
        await rig.create_job(make_slot(ranks=2)),
        await rig.create_job(make_slot(), make_slot(INFERENCE, model="other-model")),
    ]
    for job in jobs:
        await rig.until(job.name, RUNNING)
    servers = await rig.servers()
    assert sorted(len(server.devices) for server in servers) == [1, 1, 2]
    assert sorted(each for server in servers for each in ids(server)) == ["0", "1", "2", "3"]
    for server in servers:
        assert visible(rig, server) == ids(server)
    late = await rig.create_job(make_slot(ranks=3))
    await says(rig, late, "1 GPU for each of 3 ranks are not free")
    # Idle servers make room; who works goes on.
    await cancel(rig, jobs[0])
    await asyncio.sleep(0.3)
    assert (await rig.job(late.name)).state == QUEUED
    assert {server.state for server in await rig.servers()} == {READY}
    await cancel(rig, jobs[1])
    await rig.until(late.name, RUNNING)
    new = next(server for server in await rig.servers() if len(server.devices) == 3)
    assert visible(rig, new) == ids(new)
    now = [device for server in await rig.servers() for device in server.devices]
    assert len(now) == len(set(now))


async def test_gpus_of_a_killed_server_go_to_the_next(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(**(FOUR | {"gpus": ["GPU-a", "GPU-b"]}))
    job = await rig.create_job(make_slot(ranks=2))
    await rig.until(job.name, RUNNING)
    (first,) = await rig.servers()
    assert visible(rig, first) == ["GPU-a", "GPU-b"]
    os.kill(first.pid, signal.SIGKILL)
    await rig.until(job.name, job_pb2.JOB_STATE_STARTING)
    await rig.until(job.name, RUNNING)
    (second,) = await rig.servers()
    assert second.name != first.name
    assert visible(rig, second) == ["GPU-a", "GPU-b"]


async def test_a_new_process_waits_for_the_end_of_the_one_that_had_its_gpu(start_rig: Any) -> None:
    rig = await start_rig(**(FOUR | {"gpus": ["0"], "server_lease_s": 3.0}))
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (first,) = await rig.servers()
    # Its lease runs out while its process stands still: the record ends before the process does.
    os.kill(first.pid, signal.SIGSTOP)
    await wait_until(lambda: _other_pid(rig, first), 30.0, what="another process has its GPU")
    (second,) = await rig.servers()
    assert second.devices == first.devices
    assert not psutil.pid_exists(first.pid)
    await rig.until(job.name, RUNNING)


async def _other_pid(rig: Any, first: job_pb2.Server) -> bool:
    servers = await rig.servers()
    return bool(servers) and servers[0].name != first.name and servers[0].pid != 0


async def test_a_successor_knows_whose_gpus_are_whose(start_rig: Any, make_slot: Any) -> None:
    settings = FOUR | {"gpus": ["0", "1"], "stop_servers_on_exit": False}
    first = await start_rig(**settings)
    job = await first.create_job()
    await first.until(job.name, RUNNING)
    (kept,) = await first.servers()
    await first.stop()
    rig = await start_rig(**(settings | {"stop_servers_on_exit": True}))
    rig.made = first.made
    late = await rig.create_job(make_slot(model="other-model"))
    await rig.until(late.name, RUNNING)
    await rig.renew(job.name)
    servers = {server.name: server for server in await rig.servers()}
    assert servers[kept.name].devices == kept.devices
    assert sorted(each for server in servers.values() for each in visible(rig, server)) == ["0", "1"]


async def test_a_server_without_gpus_sees_none_where_they_are_given_out(start_rig: Any) -> None:
    rig = await start_rig(gpus=["0"], engine_gpus={"torch": 1})
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    assert (list(server.devices), visible(rig, server)) == ([], [""])


async def test_where_engines_take_no_gpus_a_process_sees_what_the_scheduler_does(
    start_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    rig = await start_rig()
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    (server,) = await rig.servers()
    assert seen_by(rig, server)["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert list(server.devices) == []


async def test_what_the_nodes_can_never_hold_is_refused(start_rig: Any, make_slot: Any) -> None:
    rig = await start_rig(**FOUR, accelerator="H100")
    error = await refused(rig.create_job(make_slot(ranks=5)))
    assert error.reason == Reason.CANNOT_BE_SATISFIED
    assert error.violations[0][0] == "job.slots"
    assert "needs a noop trainer server with 1 GPU of type H100 for each of 5 ranks" in error.message
    assert "has 4 (setting engine_gpus[noop]=1)" in error.message
    error = await refused(rig.create_job(make_slot(ranks=3), make_slot(INFERENCE, count=2)))
    assert "needs 5 GPUs at once" in error.message
    error = await refused(rig.create_job(make_slot(accelerator="B200")))
    assert error.reason == Reason.CANNOT_BE_SATISFIED
    assert error.violations[0][0] == "job.slots[0].options.accelerator"
    assert "no node has accelerator B200; there are H100" in error.message
    # Who names the only type there is shares servers with who names none.
    jobs = [await rig.create_job(make_slot(accelerator=name)) for name in ("H100", "")]
    for job in jobs:
        assert job.slots[0].options.accelerator == "H100"


WARM = {"role": "trainer", "base_model": "some-model", "options": {"engine": "noop"}}


async def test_servers_are_kept_ready_make_room_and_come_back(start_rig: Any, make_slot: Any) -> None:
    settings = FOUR | {"gpus": ["0", "1"], "idle_stop_s": 0.2, "warm_servers": [WARM | {"count": 2}]}
    rig = await start_rig(**settings)
    await _until_ready(rig, {"some-model": 2})
    warm = await rig.servers()
    await asyncio.sleep(1.5)
    assert [server.pid for server in await rig.servers()] == [server.pid for server in warm]
    # A job that they are for has one at once.
    job = await rig.create_job()
    await rig.until(job.name, RUNNING)
    assert [server.pid for server in await rig.servers()] == [server.pid for server in warm]
    # One of another kind needs the room of the other.
    other = await rig.create_job(make_slot(model="other-model"))
    await rig.until(other.name, RUNNING)
    await asyncio.sleep(0.5)
    await _until_ready(rig, {"some-model": 1, "other-model": 1})
    await cancel(rig, other)
    await _until_ready(rig, {"some-model": 2})


async def test_other_idle_servers_make_room_before_those_that_are_kept_ready(
    start_rig: Any, make_slot: Any
) -> None:
    rig = await start_rig(**(FOUR | {"gpus": ["0", "1"], "warm_servers": [WARM]}))
    await _until_ready(rig, {"some-model": 1})
    job = await rig.create_job(make_slot(model="other-model"))
    await rig.until(job.name, RUNNING)
    await cancel(rig, job)
    late = await rig.create_job(make_slot(model="other-model", max_lora_rank=8))
    await rig.until(late.name, RUNNING)
    await _until_ready(rig, {"some-model": 1, "other-model": 1})
    ended = [server for server in await rig.servers(include_ended=True) if server.state != READY]
    assert [server.base_model for server in ended] == ["other-model"]


async def _until_ready(rig: Any, models: dict[str, int]) -> None:
    async def there() -> bool:
        found: dict[str, int] = {}
        for server in await rig.servers():
            found[server.base_model] = found.get(server.base_model, 0) + (server.state == READY)
        return found == models

    await wait_until(there, 20.0, what=f"servers of {models}")


async def test_a_warm_server_that_dies_is_started_again_and_again_more_slowly(start_rig: Any) -> None:
    rig = await start_rig(behavior="exit:3", warm_servers=[WARM])
    began = time.monotonic()
    await wait_until(lambda: _count(rig, 2), 30.0, what="it was started again")
    assert time.monotonic() - began >= 4.5
    await asyncio.sleep(6.0)
    assert len(await rig.servers(include_ended=True)) == 2


async def _count(rig: Any, number: int) -> bool:
    return len(await rig.servers(include_ended=True)) >= number


async def test_warm_servers_that_cannot_be_are_refused_at_the_start(start_rig: Any) -> None:
    for more, field, words in (
        ([WARM | {"count": 5}], "warm_servers", "warm_servers needs 5 GPUs at once"),
        ([WARM, WARM | {"base_model": "nothing"}], "warm_servers[1].base_model", ""),
        ([WARM | {"options": {"accelerator": "H100"}}], "warm_servers[0].options.accelerator", "H100"),
    ):
        with pytest.raises(ServiceError) as caught:
            await start_rig(**FOUR, warm_servers=more)
        assert caught.value.field == field
        assert words in caught.value.message


async def test_a_server_without_a_process_that_nobody_waits_for_is_given_up(
    start_rig: Any, make_slot: Any
) -> None:
    rig = await start_rig(**FOUR)
    held = asyncio.Event()
    real = rig.scheduler.launcher.start

    async def slow(server: Any) -> Any:
        await held.wait()
        return await real(server)

    rig.scheduler.launcher.start = slow
    job = await rig.create_job(make_slot(ranks=4))
    await wait_until(lambda: _count(rig, 1), what="a server is to be started")
    await cancel(rig, job)

    async def ended() -> bool:
        (server,) = await rig.servers(include_ended=True)
        return server.state == job_pb2.SERVER_STATE_STOPPED

    await wait_until(ended, what="it is given up")
    # Its GPUs are free, and what is started for it all the same is ended.
    rig.scheduler.launcher.start = real
    late = await rig.create_job(make_slot(ranks=4))
    held.set()
    await rig.until(late.name, RUNNING)
    assert len(rig.scheduler.launcher.watched()) == 1


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    def made(**more: Any) -> SchedulerSettings:
        return SchedulerSettings(state_dir=tmp_path, **more)

    for more, words in (
        ({"gpus": ["0"], "launcher": "static"}, "gpus is for the launcher process"),
        ({"accelerator": "H100", "launcher": "static"}, "accelerator is for the launcher process"),
        ({"gpus": [], "launcher": "static"}, "gpus is for the launcher process"),
        ({"gpus": ["0"]}, "engine_gpus gives no engine"),
        ({"engine_gpus": {"vlm": 1}}, "engine_gpus names 'vlm'"),
        ({"gpus": ["0", "0"], "engine_gpus": {"torch": 1}}, "each of them once"),
        ({"engine_gpus": {"vllm": 2}}, r"engine_gpus\[vllm\] is 2: a rank of it computes on one GPU"),
        ({"engine_gpus": {"torch": -1}}, "greater than or equal to 0"),
        ({"warm_servers": [WARM], "launcher": "static"}, "warm_servers"),
        ({"warm_servers": [WARM | {"options": {"engin": "noop"}}]}, "engin"),
    ):
        with pytest.raises(ValidationError, match=words):
            made(**more)


def device_files(folder: Path, names: Iterable[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_gpus_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    nvidia = device_files(tmp_path / "nvidia", ["nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"])
    amd = device_files(tmp_path / "amd", ["kfd", "dri/renderD128", "dri/renderD129", "dri/card0"])
    none = device_files(tmp_path / "none", ["dri/renderD128"])
    assert [find_gpus(dev) for dev in (nvidia, amd, none)] == [["0", "1"], ["0", "1"], []]
    assert this_node(None, "", none) is None
    here = this_node(None, "H100", nvidia)
    assert here is not None
    assert (here.gpus, here.accelerator) == (2, "H100")
    assert this_node([], "", nvidia) == Node(here.name, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5")
    assert find_gpus(nvidia) == ["4", "GPU-5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus(nvidia) == []
