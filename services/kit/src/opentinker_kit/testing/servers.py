"""Real nats-server and weed for tests, on free ports and gone with the test process."""

import contextlib
import secrets
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from opentinker_kit.files import write_atomic
from opentinker_kit.processes import Nats, StartError, Weed, free_port, stop, wait_for_answer
from opentinker_kit.settings import S3Settings

_ATTEMPTS = 5

ServerT = TypeVar("ServerT")


@dataclass(slots=True)
class NatsServer:
    """A running nats-server."""

    nats: Nats
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        """Where it listens, with the token in it: `nats://token@127.0.0.1:port`."""
        return f"nats://{self.nats.token}@127.0.0.1:{self.nats.port}"

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again at the same address with the same data."""
        self.kill()
        program = self.nats.program()
        self.process = program.start()
        wait_for_answer(self.process, program, self.nats.answers)

    def stop(self) -> None:
        stop(self.process, grace_s=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(slots=True)
class S3Server:
    """A running weed, and how to reach it."""

    weed: Weed
    process: subprocess.Popen[bytes]
    settings: S3Settings

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Start it again at the same address with the same data."""
        self.kill()
        program = self.weed.program()
        self.process = program.start()
        wait_for_answer(self.process, program, lambda: self.weed.answers(self.settings.bucket))

    def stop(self) -> None:
        stop(self.process, grace_s=0)
        self.weed.remove_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_nats(directory: Path) -> NatsServer:
    """Start a nats-server that keeps its data in `directory`; a with statement stops it at its end."""
    return _again_if_ports_are_taken(lambda: _start_nats(directory))


def _start_nats(directory: Path) -> NatsServer:
    nats = Nats(directory, free_port(), secrets.token_hex(16))
    program = nats.program()
    server = NatsServer(nats, program.start())
    try:
        wait_for_answer(server.process, program, nats.answers)
    except StartError:
        server.stop()
        raise
    return server


def start_weed(
    directory: Path,
    bucket: str = "opentinker",
    volume_size_mb: int | None = 64,
    max_volumes: int | None = None,
) -> S3Server:
    """Start an S3 server that keeps its data in `directory`, with an empty bucket.

    It is full after `max_volumes` of `volume_size_mb`. A with statement stops it at its end.
    """
    return _again_if_ports_are_taken(lambda: _start_weed(directory, bucket, volume_size_mb, max_volumes))


def _start_weed(
    directory: Path, bucket: str, volume_size_mb: int | None, max_volumes: int | None
) -> S3Server:
    weed = Weed(directory, Weed.pick_ports(), "test", secrets.token_hex(16), volume_size_mb, max_volumes)
    program = weed.program()
    secret_file = directory / "secret.key"
    write_atomic(secret_file, weed.secret_key, mode=0o600)
    settings = S3Settings(
        endpoint=weed.endpoint, access_key=weed.access_key, secret_key_file=secret_file, bucket=bucket
    )
    server = S3Server(weed, program.start(), settings)
    try:
        wait_for_answer(server.process, program, lambda: weed.answers(bucket))
    except StartError:
        server.stop()
        raise
    return server


def _again_if_ports_are_taken(start: Callable[[], ServerT]) -> ServerT:
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(StartError):
            return start()
    return start()
