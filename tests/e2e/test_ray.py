"""`fit()` on a Ray cluster: two tenants at once, each with what it gets alone; a rank that is killed."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from services.scheduler.tests.ray_nodes import RayNodes, ray_nodes

import opentinker as ot
from opentinker.environments.builtin import GuessNumber
from opentinker_kit.files import make_key_file, write_json
from opentinker_kit.processes import Nats, Program, Weed, free_port, stop, wait_for_answer
from tests.e2e.tenants import small_fit, tenant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass
class Stack:
    """A scheduler with NATS and S3, whose servers are on Ray's nodes, and its tenants."""

    nodes: RayNodes
    admin: ot.Cluster
    tenants: dict[str, ot.Cluster]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("ray")
    keys = {name: make_key_file(folder / f"{name}.key") for name in ("bootstrap", "service", "s3", "nats")}
    nats = Nats(folder / "nats", free_port(), keys["nats"].read_text().strip())
    weed = Weed(folder / "s3", Weed.pick_ports(), "stack", keys["s3"].read_text().strip())
    running = []
    with ray_nodes(*[(1, 0)] * 4) as nodes:
        try:
            for program, answers in (
                (nats.program(), nats.answers),
                (weed.program(), lambda: weed.answers("opentinker")),
            ):
                running.append(program.start())
                wait_for_answer(running[-1], program, answers)
            address = _scheduler(folder, keys, nats, weed, nodes, tiny_model_dir, running)
            with ot.connect(address, key=keys["bootstrap"].read_text().strip()) as admin:
                tenants = {name: tenant(admin, name) for name in ("one", "two")}
                yield Stack(nodes, admin, tenants)
                for member in tenants.values():
                    member.close()
        finally:
            for process in reversed(running):
                stop(process)


def _scheduler(
    folder: Path,
    keys: dict[str, Path],
    nats: Nats,
    weed: Weed,
    nodes: RayNodes,
    model: Path,
    running: list[Any],
) -> str:
    host = nodes.address.partition(":")[0]
    port, ready = free_port(host), folder / "ready.json"
    settings = {
        "state_dir": str(folder / "state"),
        "listen_host": host,
        "listen_port": port,
        "ready_file": str(ready),
        "bootstrap_key_file": str(keys["bootstrap"]),
        "service_key_file": str(keys["service"]),
        "nats_url": nats.url,
        "nats_token_file": str(keys["nats"]),
        "s3": {
            "endpoint": weed.endpoint,
            "access_key": "stack",
            "secret_key_file": str(keys["s3"]),
            "bucket": "opentinker",
        },
        "launcher": "ray",
        "ray_address": nodes.address,
        "model_roots": [str(model.parent)],
        # As many threads on a node of its own as on a shared one, since bits depend on it.
        "server_settings": {"trainer": {"threads": 1}},
    }
    write_json(folder / "scheduler.json", settings, mode=0o600)
    argv = [sys.executable, "-m", "opentinker_scheduler", "--settings", str(folder / "scheduler.json")]
    program = Program("scheduler", argv, folder / "scheduler.log")
    running.append(program.start())
    wait_for_answer(running[-1], program, ready.exists, 60.0)
    return str(json.loads(ready.read_text())["address"])


def test_two_tenants_at_once_get_what_each_gets_alone(
    stack: Stack, tiny_model_dir: Path, tmp_path: Path
) -> None:
    def run(name: str, seed: int, where: str) -> ot.FitResult:
        return small_fit(stack.tenants[name], GuessNumber, tiny_model_dir.name, tmp_path / where, seed)

    alone = run("one", 11, "alone")
    with ThreadPoolExecutor(2) as pool:
        beside = [pool.submit(run, "one", 11, "first"), pool.submit(run, "two", 12, "second")]
        first, second = (future.result() for future in beside)
    assert first.rewards == alone.rewards
    assert first.policy.published.sha256 == alone.policy.published.sha256
    assert second.policy.published.sha256 != first.policy.published.sha256
    servers = stack.admin.servers().result()
    assert {server.launcher for server in servers} == {"ray"}
    assert len({server.base_model for server in servers}) == 1
    assert len(servers) == 2


def test_ranks_on_two_nodes_survive_the_loss_of_one(
    stack: Stack, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A rank killed in mid-run is started again on its node, and the run ends with the bits of one in which
    nothing happened."""
    trainer = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024, ranks=2)

    def run(where: str) -> ot.FitResult:
        model = tiny_model_dir.name
        return small_fit(stack.tenants["one"], GuessNumber, model, tmp_path / where, 5, trainer, steps=3)

    straight = run("straight")
    killed: list[int] = []

    def kill_one() -> None:
        metrics = tmp_path / "hurt" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().strip()):
            time.sleep(0.05)
        (rank,) = ranks_from_one_on()
        killed.append(rank.pid)
        os.kill(rank.pid, signal.SIGKILL)

    threading.Thread(target=kill_one, daemon=True).start()
    hurt = run("hurt")
    assert len(killed) == 1
    assert hurt.rewards == straight.rewards
    assert hurt.policy.published.sha256 == straight.policy.published.sha256
    # Rank 0 and the other one are on different nodes, the front beside rank 0.
    (other,) = ranks_from_one_on()
    assert other.pid not in killed
    fronts = [server for server in stack.admin.servers().result() if server.options.ranks == 2]
    places = {stack.nodes.nodes.index(stack.nodes.node_of(pid)) for pid in (other.pid, fronts[0].pid)}
    assert len(places) == 2


def ranks_from_one_on() -> list[psutil.Process]:
    """Engine processes on this machine that were started for a rank host."""
    found = []
    for process in psutil.process_iter():
        try:
            parent = process.parent()
            if parent is not None and "opentinker_trainer.rank_host" in parent.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
