"""Ranks on rank hosts: the same bits as on one machine, the same failures, and nobody without the key."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError
from services.trainer.tests.builders import sample
from services.trainer.tests.server.test_group import NAME, SPECS, gradient, saved, train

from opentinker_kit.errors import ServiceError
from opentinker_kit.files import make_key_file
from opentinker_kit.testing import wait_until
from opentinker_trainer import rank_link
from opentinker_trainer.adapters.engine_process import ProcessEngine
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.runtime.reasons import Reason

HOST = "127.0.0.1"
START = rank_link.RankStart(1, 2, HOST, 1, "cpu")


class Place:
    """A rank host's process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.key_file = make_key_file(folder / "rank.key")
        self.folder = folder
        self.log = folder / "host.log"
        self.lifeline, read_end = os.pipe()[::-1]
        argv = [
            "--listen",
            f"{HOST}:0",
            "--key-file",
            str(self.key_file),
            "--directory",
            str(folder / "files"),
        ]
        argv += ["--ready-file", str(folder / "ready"), "--lifeline-fd", str(read_end)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "opentinker_trainer.rank_host", *argv],
                stdout=output,
                stderr=output,
                pass_fds=[read_end],
            )
        os.close(read_end)

    async def address(self) -> str:
        ready = self.folder / "ready"
        await wait_until(ready.exists, 20, what="the rank host listens")
        return str(json.loads(ready.read_text())["address"])

    def ranks(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "place")
    yield place
    place.end()


async def start(model: Path, folder: Path, hosts: list[str], key_file: Path | None) -> ProcessEngine:
    settings = TrainerSettings(
        base_model="tiny", threads=1, micro_batch_tokens=64, ranks=2, rank_hosts=hosts, rank_key_file=key_file
    )
    engine = ProcessEngine(
        "torch",
        settings.load_request(model),
        log_path=folder / "engine.log",
        lifeline_fd=None,
        more_env=settings.engine_env(),
    )
    await engine.start()
    return engine


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ranks_on_a_host_give_the_bits_of_ranks_of_one_machine(
    tiny_model_dir: Path, tmp_path: Path, place: Place
) -> None:
    """LoRA and whole model; a killed rank and a killed group are replaced from what was saved on rank 0's
    side only."""
    hosts = [await place.address()]
    results = []
    for where in ([], hosts):
        engine = await start(tiny_model_dir, tmp_path, where, place.key_file)
        bits = []
        for number, spec in enumerate(SPECS):
            await engine.create_policy(NAME, spec, 1)
            await train(engine, 0, 2)
            await saved(engine, tmp_path / f"half{len(where)}{number}")
            await train(engine, 2, 4)
            bits.append(await saved(engine, tmp_path / f"straight{len(where)}{number}"))
        results.append(bits)
        if where:
            break
        await engine.close()
    assert results[0] == results[1]

    heavy = asyncio.create_task(gradient(engine, [sample(200, 300, seed) for seed in range(40)]))
    await asyncio.sleep(0.5)
    (rank,) = place.ranks()
    rank.kill()
    with pytest.raises(ServiceError, match=r"rank 1 of 2 on \S+ was killed by signal 9") as caught:
        await heavy
    assert caught.value.reason is Reason.ENGINE_CRASHED
    await asyncio.wait_for(asyncio.shield(engine.exited), 10)

    engine = await start(tiny_model_dir, tmp_path, hosts, place.key_file)
    for number, spec in enumerate(SPECS):
        await engine.create_policy(NAME, spec, 9)
        half = tmp_path / f"half1{number}"
        assert (await engine.restore(NAME, half, weights_only=False, drop_gradient=False)).step == 2
        await train(engine, 2, 4)
        assert await saved(engine, tmp_path / f"resumed{number}") == results[1][number]
    # The end of rank 0 is the end of the others.
    (rank,) = place.ranks()
    os.kill(engine.pid, signal.SIGKILL)
    await wait_until(lambda: not rank.is_running(), 10, what="the rank ends with rank 0")
    place.end()
    with pytest.raises(ServiceError, match=r"rank host \S+ cannot be used"):
        await start(tiny_model_dir, tmp_path, hosts, place.key_file)


async def test_a_caller_without_the_key_starts_nothing(place: Place) -> None:
    address = await place.address()
    with pytest.raises(rank_link.LinkError, match="does not know this host's key"):
        await asyncio.to_thread(rank_link.connect, address, START, "another key")
    host, port = address.split(":")
    for nonsense in (b"{}\n", b"GET / HTTP/1.1\r\n\r\n", b'{"start": "[]", "proof": "0"}\n'):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(nonsense)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
    assert place.ranks() == []
    # The host is there for who knows it.
    rank = await asyncio.to_thread(rank_link.connect, address, START, place.key_file.read_text().strip())
    rank.close()


async def test_a_rank_starts_in_place_of_the_one_before_and_ends_with_its_host(place: Place) -> None:
    address, key = await place.address(), place.key_file.read_text().strip()
    # These ranks wait for a rendezvous that nobody holds.
    first = await asyncio.to_thread(rank_link.connect, address, START, key)
    (old,) = place.ranks()
    second = await asyncio.to_thread(rank_link.connect, address, START, key)
    await wait_until(lambda: not old.is_running(), 5, what="the first is replaced")
    last = await asyncio.to_thread(rank_link.receive_frame, first)
    assert last is not None
    assert (last.method, last.body) == (rank_link.EXIT, b"-9")
    (new,) = place.ranks()
    os.close(place.lifeline)
    await wait_until(lambda: not new.is_running(), 5, what="the rank ends with its host")
    assert place.process.wait(5) != 0
    for connection in (first, second):
        connection.close()


def test_settings_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="rank_hosts names 1 hosts; ranks is 3"):
        TrainerSettings(base_model="tiny", ranks=3, rank_hosts=["h:1"], rank_key_file=tmp_path / "key")
    with pytest.raises(ValidationError, match="rank_hosts needs rank_key_file"):
        TrainerSettings(base_model="tiny", ranks=2, rank_hosts=["h:1"])


def test_a_folder_arrives_as_it_was(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "empty").write_bytes(b"")
    (there / "whole").write_bytes(bytes(4 << 20))
    (there / "more").write_bytes(os.urandom((4 << 20) + 1))
    ours, theirs = socket.socketpair()
    received: dict[str, bytes] = {}

    async def move() -> None:
        sending = asyncio.create_task(asyncio.to_thread(rank_link.send_folder, ours, there))
        while not (sending.done() and len(received) == 3):
            frame = await asyncio.to_thread(rank_link.receive_frame, theirs)
            assert frame is not None
            if frame.method == rank_link.FILE:
                name, _, data = frame.body.partition(b"\n")
                received[name.decode()] = received.get(name.decode(), b"") + data
                if name == b"whole" and not data:
                    await sending

    asyncio.run(move())
    assert received == {path.name: path.read_bytes() for path in there.iterdir()}
