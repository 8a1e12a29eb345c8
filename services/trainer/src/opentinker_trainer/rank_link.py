"""How rank 0 of a trainer reaches rank hosts on other machines, and proves that it may.

    host -> a nonce                      one line each
    rank 0 -> {"start": …, "proof": …}   the proof is HMAC-SHA256 over nonce and start, with the key of both
    host -> {"pid": …} or {"error": …}
    then frames, both ways; the last one says how the rank ended

What follows is not encrypted, as what ranks say to each other through gloo or NCCL is not: the network
between the hosts of one trainer must be trusted.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from opentinkerapi.engine.v1 import frame_pb2

HOSTS_VARIABLE = "OPENTINKER_RANK_HOSTS"
"""JSON of `RankHosts`, for an engine whose other ranks are on rank hosts."""
FD_VARIABLE = "OPENTINKER_RANK_FD"
DEVICE_VARIABLE = "OPENTINKER_RANK_DEVICE"
ADDRESS_VARIABLE = "OPENTINKER_RANK_ADDRESS"
FOLDER_VARIABLE = "OPENTINKER_RANK_FOLDER"
"""Where a rank on another host keeps files that rank 0 sends it."""

EXIT = "_Exit"
"""Method of a host's last frame; the body is the exit status."""

_HANDSHAKE_S = 15.0
_MAX_LINE = 1 << 16
_LENGTH = struct.Struct("<I")


class LinkError(ConnectionError):
    """A rank host could not be reached, or does not do what it is asked."""


@dataclass(frozen=True, slots=True)
class RankHosts:
    """Where the ranks from 1 on are."""

    hosts: tuple[str, ...]
    """`host:port` of their rank hosts, in rank order."""
    address: str
    """What this machine is to them."""
    key_file: str

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "RankHosts":
        value = json.loads(text)
        return cls(tuple(value["hosts"]), value["address"], value["key_file"])


@dataclass(frozen=True, slots=True)
class RankStart:
    """What a host needs to know to start a rank."""

    rank: int
    count: int
    master_address: str
    master_port: int
    device: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that decide results, such as the number of threads."""


def variables(start: RankStart, connection: socket.socket, local_rank: int) -> dict[str, str]:
    """What a rank's process finds in its environment: as torchrun would put it, and its way to rank 0."""
    return {
        "RANK": str(start.rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(start.count),
        "MASTER_ADDR": start.master_address,
        "MASTER_PORT": str(start.master_port),
        FD_VARIABLE: str(connection.fileno()),
        DEVICE_VARIABLE: start.device,
    }


PASSED_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "HF_HUB_OFFLINE")
"""Variables of rank 0 that every rank gets."""


def connect(host: str, start: RankStart, key: str) -> socket.socket:
    """Have a rank host start a rank; the connection to that rank. LinkError."""
    name, _, port = host.rpartition(":")
    try:
        connection = socket.create_connection((name.strip("[]"), int(port)), timeout=_HANDSHAKE_S)
        keep_alive(connection)
        nonce = _read_line(connection)
        told = json.dumps(asdict(start), sort_keys=True)
        _write_line(connection, json.dumps({"start": told, "proof": _proof(key, nonce, told)}))
        answer = json.loads(_read_line(connection))
        connection.settimeout(None)
    except (OSError, ValueError) as error:
        raise LinkError(f"rank host {host} cannot be used: {error}") from error
    if "error" in answer:
        connection.close()
        raise LinkError(f"rank host {host} refuses: {answer['error']}")
    return connection


def accept(connection: socket.socket, key: str) -> RankStart:
    """What a caller wants started. LinkError if it does not know the key."""
    connection.settimeout(_HANDSHAKE_S)
    nonce = secrets.token_hex(32)
    try:
        _write_line(connection, nonce)
        said = json.loads(_read_line(connection))
        told, proof = str(said["start"]), str(said["proof"])
        if not hmac.compare_digest(_proof(key, nonce, told), proof):
            raise LinkError("the caller does not know this host's key")
        value: dict[str, Any] = json.loads(told)
        env = {name: str(value["env"][name]) for name in PASSED_VARIABLES if name in value["env"]}
        return RankStart(**{**value, "env": env})
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, LinkError):
            raise
        raise LinkError(f"the caller makes no sense: {error!r}") from error


def answer(connection: socket.socket, *, pid: int = 0, error: str = "") -> None:
    """Tell the caller whether its rank runs. OSError."""
    _write_line(connection, json.dumps({"error": error} if error else {"pid": pid}))
    connection.settimeout(None)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    return None


def send_frame(connection: socket.socket, frame: frame_pb2.Frame) -> None:
    """Write a frame, its length before it. OSError."""
    data = frame.SerializeToString()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket) -> frame_pb2.Frame | None:
    """The next frame, or None at the end."""
    head = _receive(connection, _LENGTH.size)
    data = None if head is None else _receive(connection, _LENGTH.unpack(head)[0])
    return None if data is None else frame_pb2.Frame.FromString(data)


def send_folder(connection: socket.socket, folder: Path) -> None:
    """Send the files of a folder, to be put where the other side keeps them. OSError."""
    send_frame(connection, frame_pb2.Frame(method=FOLDER))
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            while True:
                data = file.read(_CHUNK)
                send_frame(connection, frame_pb2.Frame(method=FILE, body=path.name.encode() + b"\n" + data))
                if len(data) < _CHUNK:
                    break


FOLDER, FILE = "_Folder", "_File"
"""Methods of frames that have no answer: an empty folder; more of a file of it (name, line feed, bytes)."""
_CHUNK = 4 << 20


def _proof(key: str, nonce: str, told: str) -> str:
    return hmac.new(key.encode(), f"{nonce}\n{told}".encode(), hashlib.sha256).hexdigest()


def _read_line(connection: socket.socket) -> str:
    line = bytearray()
    while not line.endswith(b"\n"):
        # Byte by byte, so that nothing of the frames behind it is read.
        part = connection.recv(1)
        if not part or len(line) >= _MAX_LINE:
            raise LinkError("the connection ended before a line did")
        line += part
    return line[:-1].decode()


def _write_line(connection: socket.socket, text: str) -> None:
    connection.sendall(text.encode() + b"\n")


def _receive(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
