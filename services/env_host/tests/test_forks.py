"""Snapshots of episodes, forks of them, and the way back."""

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
from services.env_host.tests.conftest import Running, Start, stop, text_of, world

from opentinker_kit.testing.waiting import wait_until
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1 import environment_pb2, snapshot_pb2
from opentinkerapi.runtime.errors import OpenTinkerError

NATIVE, COPY = environment_pb2.SNAPSHOT_KIND_NATIVE, environment_pb2.SNAPSHOT_KIND_COPY
REPLAY, NONE = environment_pb2.SNAPSHOT_KIND_REPLAY, environment_pb2.SNAPSHOT_KIND_NONE


async def snapshot(host: Running, episode: str, request_id: str = "") -> snapshot_pb2.SnapshotResponse:
    request = snapshot_pb2.SnapshotRequest(request_id=request_id or uuid.uuid4().hex, episode=episode)
    return await host.call(host.stub.Snapshot(request))


async def fork(host: Running, name: str, size: int = 1, request_id: str = "") -> snapshot_pb2.ForkResponse:
    request = snapshot_pb2.ForkRequest(request_id=request_id or uuid.uuid4().hex, snapshot=name, size=size)
    return await host.call(host.stub.Fork(request))


async def restore(
    host: Running, episode: str, name: str, request_id: str = ""
) -> snapshot_pb2.RestoreResponse:
    request = snapshot_pb2.RestoreRequest(
        request_id=request_id or uuid.uuid4().hex, episode=episode, snapshot=name
    )
    return await host.call(host.stub.Restore(request))


async def seen(host: Running, episode: str, seq: int, text: str = "on") -> str:
    return text_of((await host.step(episode, seq, text)).pending)


async def error_of(call: Any) -> OpenTinkerError:
    with pytest.raises(OpenTinkerError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("name", "exclusive", "said", "kind"),
    [
        ("Native", False, NATIVE, NATIVE),
        ("Native", True, NATIVE, NATIVE),
        ("HonestNative", False, NATIVE, NATIVE),
        ("Counter", False, COPY, COPY),
        ("Counter", True, COPY, REPLAY),
        ("Uncopyable", False, REPLAY, REPLAY),
        ("Unpicklable", False, COPY, REPLAY),
        ("WrongState", False, NATIVE, REPLAY),
    ],
)
async def test_a_fork_goes_on_as_the_episode_does(
    name: str, exclusive: bool, said: int, kind: int, start: Start
) -> None:
    host = await start({"game": world(name, exclusive=exclusive)})
    listed = await host.call(host.stub.ListEnvironments(pb.ListEnvironmentsRequest()))
    assert listed.environments[0].snapshots == said
    (episode,) = await host.open("game", seed=5)
    first = await host.begin(episode)
    await host.step(episode, 1, "on")
    taken = await snapshot(host, episode)
    assert (taken.kind, taken.seq) == (kind, 1)
    forked = await fork(host, taken.snapshot, 3)
    assert (forked.kind, forked.next_seq, len(forked.episodes)) == (kind, 2, 3)
    # All see what the episode sees; what one does is nothing to the others.
    expected = [await seen(host, episode, 2), await seen(host, episode, 3)]
    for each in forked.episodes:
        assert await host.begin(each) == first
        assert [await seen(host, each, 2), await seen(host, each, 3)] == expected
    ended = await host.step(forked.episodes[0], 4, "end")
    assert ended.terminated
    assert (await host.finalize(forked.episodes[0])).rewards[0].reward.value == pytest.approx(1.5 + 4)
    assert await seen(host, episode, 4) == await seen(host, forked.episodes[1], 4)
    # The way back: its steps are other ones now, and its rewards begin there again.
    back = await restore(host, episode, taken.snapshot)
    assert (back.kind, back.next_seq) == (kind, 2)
    assert await seen(host, episode, 2) == expected[0]
    assert (await host.finalize(episode)).rewards[0].reward.value == pytest.approx(1.0)


async def test_repetitions_get_the_first_answer(start: Start) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    taken = await snapshot(host, episode, "a")
    assert await snapshot(host, episode, "a") == taken
    made = await fork(host, taken.snapshot, 2, "b")
    assert (await fork(host, taken.snapshot, 2, "b")).episodes == made.episodes
    assert (await error_of(fork(host, taken.snapshot, 3, "b"))).reason == "REQUEST_ID_REUSED"
    once = await restore(host, episode, taken.snapshot, "c")
    await host.step(episode, 1, "on")
    assert await restore(host, episode, taken.snapshot, "c") == once
    # That was the answer of the first one: the episode was not taken back twice.
    await host.step(episode, 2, "on")


async def test_what_cannot_be_taken_is_said(start: Start) -> None:
    host = await start({"counter": world("Counter"), "fickle": world("HonestUncopyable")})
    assert (await error_of(snapshot(host, "episodes/none-0"))).reason == "EPISODE_NOT_FOUND"
    (episode,) = await host.open()
    assert "has not begun" in (await error_of(snapshot(host, episode))).message
    await host.begin(episode)
    taken = await snapshot(host, episode)
    assert (await error_of(fork(host, "snapshots/none"))).reason == "SNAPSHOT_NOT_FOUND"
    assert (await error_of(fork(host, taken.snapshot, 0))).field == "size"
    assert (await error_of(fork(host, taken.snapshot, 5000))).field == "size"
    (other,) = await host.open()
    await host.begin(other)
    assert (await error_of(restore(host, other, taken.snapshot))).field == "snapshot"
    await host.finalize(episode)
    assert "was finalized" in (await error_of(snapshot(host, episode))).message
    (fickle,) = await host.open("fickle")
    await host.begin(fickle)
    error = await error_of(snapshot(host, fickle))
    assert (error.reason, "does not promise to repeat itself" in error.message) == ("INVALID_STATE", True)
    # It goes on all the same.
    await host.step(fickle, 1, "on")


async def test_a_copy_that_died_with_its_worker_is_played_again(start: Start) -> None:
    host = await start({"counter": world("Counter"), "honest": world("Honest")})
    for name, is_lost in (("counter", False), ("honest", True)):
        (episode,) = await host.open(name)
        await host.begin(episode)
        await host.step(episode, 1, "on")
        taken = await snapshot(host, episode)
        assert taken.kind == COPY
        (worker,) = host.workers(name)
        os.kill(worker.pid, signal.SIGKILL)
        await wait_until(lambda worker=worker: not worker.alive, what="the worker is gone")
        if is_lost:
            assert "was lost with its worker" in (await error_of(fork(host, taken.snapshot))).message
            assert host.env_host.host.open_by_environment()[name] == 1
        else:
            made = await fork(host, taken.snapshot)
            assert made.kind == REPLAY
            assert await seen(host, made.episodes[0], 2) == await seen(host, episode, 2)


async def test_forks_survive_a_restart_of_the_host(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    host = await start({"game": world("Native")}, state_dir=state)
    (episode,) = await host.open("game")
    await host.begin(episode)
    await host.step(episode, 1, "on")
    taken = await snapshot(host, episode)
    (forked,) = (await fork(host, taken.snapshot)).episodes
    await host.step(episode, 2, "on")
    await restore(host, episode, taken.snapshot)
    await stop(host)
    again = await start({"game": world("Native")}, state_dir=state)
    # The snapshot is gone with the host; what was made of it is not.
    assert (await error_of(fork(again, taken.snapshot))).reason == "SNAPSHOT_NOT_FOUND"
    assert await seen(again, episode, 2) == await seen(again, forked, 2)


async def test_snapshots_that_nobody_uses_go(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    host = await start()
    (episode,) = await host.open()
    await host.begin(episode)
    taken = await snapshot(host, episode)
    forks = host.env_host.host.forks
    await forks.tidy()
    await fork(host, taken.snapshot)
    monkeypatch.setattr("opentinker_env_host.domain.forks.KEPT_S", -1.0)
    await forks.tidy()
    assert (await error_of(fork(host, taken.snapshot))).reason == "SNAPSHOT_NOT_FOUND"
