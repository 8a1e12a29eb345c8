"""What is left of a stack, seen from outside."""

import contextlib
import json
import os
import socket
from pathlib import Path

import psutil

from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_local import StackInfo


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def tree(pid: int) -> set[int]:
    """The process and everything below it."""
    process = psutil.Process(pid)
    return {pid, *(child.pid for child in process.children(recursive=True))}


def listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.5):
        return True
    return False


def addresses(info: StackInfo) -> tuple[str, ...]:
    """Every address of the stack."""
    ports = json.loads((info.state_dir / "ports.json").read_text())
    inner = tuple(f"127.0.0.1:{port + offset}" for port in ports["weed"] for offset in (0, 10_000))
    gateway = info.gateway.removeprefix("http://")
    return (info.scheduler, info.env_host, gateway, info.nats.removeprefix("nats://"), *inner)


def gone(pids: set[int], info: StackInfo) -> bool:
    """Whether nothing of a stack is left: no process, no port."""
    return not any(map(alive, pids)) and not any(map(listening, addresses(info)))


def store(info: StackInfo) -> S3ObjectStore:
    """The stack's object store."""
    return S3ObjectStore(
        S3Settings(endpoint=info.s3, access_key="stack", secret_key_file=info.state_dir / "keys" / "s3.key")
    )


def mode(path: Path) -> int:
    return os.stat(path).st_mode & 0o777
