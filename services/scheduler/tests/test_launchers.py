"""What every launcher promises: `process` and `ray`, and `static`, which starts nothing."""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from services.scheduler.tests.ray_nodes import RayNodes, ray_nodes

from opentinker_kit.files import make_key_file
from opentinker_kit.testing import wait_until
from opentinker_scheduler.adapters.processes import ProcessLauncher, Recipe, StaticLauncher
from opentinker_scheduler.adapters.ray_cluster import RayCluster
from opentinker_scheduler.adapters.ray_launcher import RayLauncher, RayRecipe
from opentinker_scheduler.domain.model import Role, Server, ServerOptions, ServerState
from opentinker_scheduler.launch_settings import node_settings
from opentinker_scheduler.launcher_ports import Launcher, OnExit
from opentinker_scheduler.settings import SchedulerSettings

MODULES = {"trainer": "small_program"}


class Watch:
    """A launcher and what it said about exits."""

    def __init__(self, make: Callable[[OnExit], Launcher]) -> None:
        self.exits: list[tuple[str, int | None]] = []
        self.launcher = make(lambda *exit: self.exits.append(exit))


Make = Callable[..., Watch]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes((4, 0), (4, 0)) as cluster:
        yield cluster


@pytest.fixture(params=["process", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.timeout(180)])])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes launchers of one cluster, one after the other."""
    made: list[Watch] = []
    cluster = secrets.token_hex(4)

    def process(settings: dict[str, int]) -> Watch:
        recipe = Recipe(tmp_path / "servers", sys.executable, MODULES, lambda server, path: settings)
        return Watch(lambda on_exit: ProcessLauncher(recipe, on_exit))

    def ray(settings: dict[str, int]) -> Watch:
        address = request.getfixturevalue("nodes").address
        recipe = RayRecipe(
            directory=tmp_path / "servers",
            python="",
            modules=MODULES,
            told=lambda server: (settings, {}),
            bundle_for=lambda server: {"CPU": 1.0},
            new_key=lambda: "key",
        )
        return Watch(lambda on_exit: RayLauncher(recipe, RayCluster(address, lambda: cluster), on_exit))

    def new(**settings: int) -> Watch:
        made.append({"process": process, "ray": ray}[request.param](settings))
        return made[-1]

    yield new
    last = new()
    for watch in made[:-1]:
        watch.launcher.close()
    await last.launcher.adopt([])
    last.launcher.close()


def server(name: str = "s1") -> Server:
    now = datetime.now(UTC)
    return Server(name, Role.TRAINER, "m", ServerOptions(), ServerState.LAUNCHING, 1, "process", now)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def child_in(log: Path) -> int:
    await wait_until(lambda: log.exists() and log.read_text().strip().isdigit(), 20, what="the child runs")
    return int(log.read_text())


async def test_started_once_and_stopped_with_what_it_started(make: Make) -> None:
    watch = make()
    assert await watch.launcher.adopt([]) == {}
    first = await watch.launcher.start(server())
    assert await watch.launcher.start(server()) == first
    assert list(watch.launcher.watched()) == ["s1"]
    child = await child_in(first.log_path)
    await watch.launcher.stop("s1", 5.0)
    await wait_until(lambda: not alive(child) and not alive(first.pid))
    await wait_until(lambda: watch.exits == [("s1", -signal.SIGTERM)])
    assert watch.launcher.watched() == ()
    await watch.launcher.stop("s1", 5.0)
    # Its name is free again.
    again = await watch.launcher.start(server())
    assert again.pid != first.pid
    await watch.launcher.stop("s1", 0.0)


async def test_exit_code_and_log_come_back(make: Make) -> None:
    watch = make(exit=3)
    await watch.launcher.adopt([])
    await watch.launcher.start(server())
    await wait_until(lambda: watch.exits == [("s1", 3)], 30, what="the end is told")
    assert watch.launcher.log_tail("s1") == "something broke"
    assert watch.launcher.watched() == ()

    async def read() -> bool:
        part = await watch.launcher.read_log("s1", 4, 100)
        return part is not None and (part.data, part.size) == (b"thing broke\n", 16)

    await wait_until(read, 10, what="the log can be read")


async def test_a_killed_server_is_told_and_leaves_nothing(make: Make) -> None:
    watch = make()
    await watch.launcher.adopt([])
    started = await watch.launcher.start(server())
    child = await child_in(started.log_path)
    os.kill(started.pid, signal.SIGKILL)
    await wait_until(lambda: watch.exits == [("s1", -signal.SIGKILL)], 20, what="the end is told")
    await wait_until(lambda: not alive(child), what="its child ends")


async def test_a_successor_takes_over_what_is_on_record_and_ends_the_rest(make: Make) -> None:
    first = make()
    await first.launcher.adopt([])
    known, unknown = [await first.launcher.start(server(name)) for name in ("s1", "s2")]
    children = [await child_in(one.log_path) for one in (known, unknown)]
    first.launcher.close()
    second = make()
    adopted = await second.launcher.adopt([known.recorded(server())])
    assert {name: started.pid for name, started in adopted.items()} == {"s1": known.pid}
    assert list(second.launcher.watched()) == ["s1"]
    await wait_until(lambda: not alive(unknown.pid) and not alive(children[1]), 20, what="s2 is ended")
    assert alive(known.pid)
    os.kill(known.pid, signal.SIGKILL)
    # Who did not start a process may not know how it ended.
    await wait_until(lambda: second.exits in ([("s1", None)], [("s1", -9)]), 20, what="the end is told")
    await wait_until(lambda: not alive(children[0]))


async def test_a_successor_without_a_server_on_record_says_nothing_of_it(make: Make) -> None:
    watch = make()
    now = datetime.now(UTC)
    gone = Server("s9", Role.TRAINER, "m", ServerOptions(), ServerState.READY, 1, "process", now, pid=1 << 22)
    assert await watch.launcher.adopt([gone]) == {}
    assert watch.launcher.watched() == ()


@pytest.mark.slow
async def test_where_there_is_no_room_a_start_waits_and_can_be_given_up(
    nodes: RayNodes, tmp_path: Path
) -> None:
    recipe = RayRecipe(
        directory=tmp_path,
        python="",
        modules=MODULES,
        told=lambda server: ({}, {}),
        bundle_for=lambda server: {"CPU": 64.0, "GPU": 2.0},
        new_key=lambda: "key",
        adds_nodes="KubeRay group h100",
    )
    cluster = RayCluster(nodes.address, lambda: "roomy")
    launcher = RayLauncher(recipe, cluster, lambda *exit: None)
    await launcher.adopt([])
    starting = asyncio.create_task(launcher.start(server()))
    text = "waiting for the Ray cluster to have 64 CPU, 2 GPU free; KubeRay group h100 was asked for nodes"
    await wait_until(lambda: launcher.waits() == {"s1": text}, 20, what="it waits")
    assert list(await cluster.groups()) == ["s1"]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await cluster.groups() == []
    assert launcher.waits() == {}
    launcher.close()


def test_settings_of_ray_that_would_do_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, words in (
        ({"ray_bundles": {"torch": {"CPU": 4}}}, "ray_bundles is for the launcher ray"),
        ({"ray_autoscaler": "KubeRay"}, "ray_autoscaler is for the launcher ray"),
        ({"launcher": "ray", "ray_bundles": {"torch": {"GPU": 1}}}, "say in engine_gpus how many"),
        ({"launcher": "ray", "ray_bundles": {"torhc": {"CPU": 1}}}, "ray_bundles names 'torhc'"),
        ({"launcher": "ray", "ray_bundles": {"torch": {"CPU": 0}}}, "greater than 0"),
        ({"launcher": "ray", "engines": ["torhc"]}, "engines names 'torhc'"),
    ):
        with pytest.raises(ValidationError, match=words):
            SchedulerSettings(state_dir=tmp_path, **more)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValidationError, match=r'pip install "opentinker-scheduler\[ray\]"'):
        SchedulerSettings(state_dir=tmp_path, launcher="ray")


def test_what_a_server_on_another_host_is_told(tmp_path: Path) -> None:
    """Files of this host are taken along, and what means nothing there is left out; the operator's own
    settings for the role are of that host."""
    keys = {f"{name}_key_file": make_key_file(tmp_path / f"{name}.key") for name in ("service", "bootstrap")}
    settings = SchedulerSettings(
        state_dir=tmp_path,
        launcher="ray",
        listen_host="10.0.0.2",
        lifeline_fd=3,
        traces_file=tmp_path / "traces.jsonl",
        engine_gpus={"torch": 1},
        s3={"endpoint": "s3:9000", "access_key": "a", "secret_key_file": str(tmp_path / "s3.key")},
        server_settings={"trainer": {"metrics_key_file": "/etc/there.key"}},
        **keys,
    )
    asked = server()
    asked = replace(asked, options=ServerOptions(engine="torch"))
    told, files = node_settings(settings, "10.0.0.2:7070", asked)
    assert files == {
        "service_key_file": keys["service_key_file"],
        "bootstrap_key_file": keys["bootstrap_key_file"],
        "s3.secret_key_file": tmp_path / "s3.key",
    }
    assert told["service_key_file"] == "{folder}/service_key_file"
    assert told["s3"]["secret_key_file"] == "{folder}/s3.secret_key_file"
    assert told["metrics_key_file"] == "/etc/there.key"
    assert (told["listen_host"], told["state_dir"], told["device"]) == ("{address}", "{folder}", "cuda")
    assert told["scheduler_address"] == "10.0.0.2:7070"
    assert not {"lifeline_fd", "traces_file", "scheduler_address_file"} & told.keys()
    assert settings.offer().engines[Role.INFERENCE] == ("vllm", "transformers", "noop")


@pytest.mark.slow
async def test_a_start_that_fails_leaves_nothing_reserved(nodes: RayNodes, tmp_path: Path) -> None:
    for told, module, words in (
        (lambda server: ({}, {"key": tmp_path / "none.key"}), "small_program", "none.key"),
        (lambda server: ({"scheduler_address": "127.0.0.1:1"}, {}), "small_program", ""),
    ):
        recipe = RayRecipe(
            directory=tmp_path,
            python="" if words else "/no/such/python",
            modules={"trainer": module},
            told=told,
            bundle_for=lambda server: {"CPU": 1.0},
            new_key=lambda: "key",
        )
        cluster = RayCluster(nodes.address, lambda: "failing")
        launcher = RayLauncher(recipe, cluster, lambda *exit: None)
        await launcher.adopt([])
        with pytest.raises(OSError, match=words or "cannot be started"):
            await launcher.start(server())
        assert await cluster.groups() == []
        assert launcher.watched() == ()
        launcher.close()


async def test_static_starts_nothing_and_says_so() -> None:
    launcher: Launcher = StaticLauncher()
    assert (launcher.name, launcher.can_launch) == ("static", False)
    with pytest.raises(OSError, match="starts no servers"):
        await launcher.start(server())
    assert await launcher.adopt([server()]) == {}
    await launcher.stop("s1", 0.0)
    assert (launcher.watched(), launcher.waits(), launcher.log_tail("s1")) == ((), {}, "")
    launcher.close()


@pytest.mark.slow
def test_nothing_stays_reserved(nodes: RayNodes) -> None:
    """The last one: whatever the others started and lost, their nodes are free."""
    assert nodes.reserved() == []
