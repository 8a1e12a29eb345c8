"""The stack in peace: starting, attaching, stopping, going on with its data."""

import fcntl
import http.client
import os
import subprocess
import threading
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from opentinker_kit.events import NatsEventBus
from opentinker_kit.settings import read_secret
from opentinker_local import NotRunning, StackError, attach, stop_stack
from opentinker_local.state import StateDir, read_progress
from opentinkerapi.events.v1 import event_pb2

from .conftest import FAKE, StartFake
from .looking import alive, gone, mode, store, tree


async def test_a_stack_is_ready_when_it_says_so(start_fake: StartFake) -> None:
    info = start_fake()
    for address in (info.scheduler, info.env_host):
        with grpc.insecure_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    objects = store(info)
    assert await objects.put_if_absent("kept", b"bytes")
    bus = NatsEventBus(info.nats, read_secret(info.state_dir / "keys" / "nats.key"))
    event = event_pb2.Event(id="1", server_lost=event_pb2.ServerLost(server="servers/1"))
    assert await bus.deliver(event, timeout_s=5)
    await bus.close()
    keys = list((info.state_dir / "keys").iterdir())
    assert {path.name for path in keys} == {"bootstrap.key", "service.key", "nats.key", "s3.key"}
    assert all(mode(path) == 0o600 for path in keys)
    assert mode(info.state_dir) == 0o700
    assert all(len(read_secret(path)) >= 43 for path in keys)
    written = (info.state_dir / "stack.json").read_text() + (info.state_dir / "progress.jsonl").read_text()
    assert not any(read_secret(path) in written for path in keys)

    pids = tree(info.supervisor_pid)
    assert len(pids) == 5
    assert stop_stack(info.state_dir)
    assert gone(pids, info)
    assert not (info.state_dir / "stack.json").exists()

    again = start_fake()
    same = ("scheduler", "env_host", "gateway", "s3")
    assert [getattr(again, name) for name in same] == [getattr(info, name) for name in same]
    assert await store(again).get("kept") == b"bytes"


def test_a_second_supervisor_on_one_directory_says_who_is_there(start_fake: StartFake) -> None:
    info = start_fake()
    argv = [*FAKE, "run", "--state-dir", str(info.state_dir)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 3
    assert f"pid {info.supervisor_pid}" in done.stderr
    assert attach(info.state_dir) == info
    assert info.owned


def test_nothing_runs_in_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match=str(tmp_path)):
        attach(tmp_path)
    assert not stop_stack(tmp_path)


def test_a_start_that_fails_says_why_and_leaves_nothing(
    start_fake: StartFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_SERVICE_MODE", "fail")
    with pytest.raises(StackError, match="the settings make no sense") as caught:
        start_fake()
    log = tmp_path / "stack" / "scheduler" / "scheduler.log"
    assert str(log) in str(caught.value) or "env_host.log" in str(caught.value)
    assert StateDir(tmp_path / "stack").holder() is None


def test_settings_reach_the_parts(start_fake: StartFake, tmp_path: Path) -> None:
    with pytest.raises(StackError, match="listen_port"):
        start_fake(settings={"scheduler": {"listen_port": 70_000}})
    bad = tmp_path / "options.json"
    bad.write_text("[]")
    argv = [*FAKE, "run", "--state-dir", str(tmp_path / "other"), "--options", str(bad)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "settings by part" in done.stderr


def test_progress_can_be_read_by_who_waits(start_fake: StartFake) -> None:
    info = start_fake()
    entries = read_progress(info.state_dir / "progress.jsonl", info.supervisor_pid)
    assert [entries[0]["state"], entries[-1]["state"]] == ["starting", "ready"]
    assert {entry.get("component") for entry in entries} >= {"nats", "s3", "scheduler", "env_host"}


def test_a_stop_takes_along_what_the_parts_started_and_what_does_not_listen(
    start_fake: StartFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIT_SERVICE_MODE", "spawn")
    info = start_fake(owned=False)
    pids = tree(info.supervisor_pid)
    assert len(pids) == 7
    assert stop_stack(info.state_dir)
    assert not any(map(alive, pids))


def test_the_gateway_starts_when_somebody_connects(start_fake: StartFake) -> None:
    """No connection is refused, before it runs or after it died."""
    info = start_fake()
    assert "gateway" not in info.pids
    assert len(tree(info.supervisor_pid)) == 5
    first = ask(info.gateway)
    assert first in tree(info.supervisor_pid)
    assert ask(info.gateway) == first
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(info.gateway + "/crash")
    second = ask(info.gateway)
    assert second != first
    pids = tree(info.supervisor_pid)
    assert second in pids
    assert stop_stack(info.state_dir)
    assert gone(pids, info)


def ask(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.read())


def test_a_look_at_the_lock_is_not_taken_for_a_supervisor(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.make()
    state.lock.touch()
    with state.lock.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.2, fcntl.flock, args=(looking, fcntl.LOCK_UN))
        timer.start()
        with state.hold(owned=False):
            assert state.holder() == os.getpid()
        timer.join()
    assert state.holder() is None
