"""The other ranks of a group, as rank 0 sees them: processes of this machine, or on rank hosts."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from google.protobuf.message import Message

from opentinker_trainer import rank_link
from opentinker_trainer.rank_link import RankStart, receive_frame, send_frame
from opentinkerapi.engine.v1 import frame_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb

OnEnd = Callable[[int, str], None]
"""Told rank and how it ended ("was killed by signal 9"), from a thread; perhaps more than once."""


class Worker(Protocol):
    """One of the other ranks. Requests are answered in order."""

    @property
    def rank(self) -> int: ...

    @property
    def replies(self) -> "queue.SimpleQueue[frame_pb2.Frame | None]":
        """One for each request; None when it is gone."""
        ...

    @property
    def refused(self) -> threading.Event:
        """Set when a reply is an error."""
        ...

    def send(self, call_id: int, method: str, request: Message) -> None:
        """Ask for something. Whoever waits for the end of a rank that is gone is told of it."""
        ...


class _Connected:
    """What workers have in common: a connection, and who reads it."""

    def __init__(self, rank: int, connection: socket.socket, on_end: OnEnd) -> None:
        self.rank = rank
        self.replies: queue.SimpleQueue[frame_pb2.Frame | None] = queue.SimpleQueue()
        self.refused = threading.Event()
        self._socket = connection
        self._on_end = on_end
        threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True).start()

    def send(self, call_id: int, method: str, request: Message) -> None:
        frame = frame_pb2.Frame(call_id=call_id, method=method, body=request.SerializeToString())
        with contextlib.suppress(OSError):
            send_frame(self._socket, frame)

    def _read(self) -> None:
        while (frame := receive_frame(self._socket)) is not None and frame.method != rank_link.EXIT:
            if frame.HasField("error"):
                self.refused.set()
            self.replies.put(frame)
        self.replies.put(None)
        self._gone(frame)

    def _gone(self, last: frame_pb2.Frame | None) -> None:
        """The connection ended, with this frame if the other side had time for one."""


class LocalWorker(_Connected):
    """A process of this machine, in the process group of rank 0."""

    def __init__(self, start: RankStart, on_end: OnEnd) -> None:
        """Start it. OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = {**os.environ, **rank_link.variables(start, theirs, start.rank)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "opentinker_trainer.engine"],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        super().__init__(start.rank, ours, on_end)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self._on_end(self.rank, how_it_ended(self._process.wait()))


class RemoteWorker(_Connected):
    """A process on a rank host. What it reads from files of this machine is sent to it."""

    def __init__(self, start: RankStart, host: str, key: str, on_end: OnEnd) -> None:
        """Have it started. `rank_link.LinkError`."""
        self._host = host
        super().__init__(start.rank, rank_link.connect(host, start, key), on_end)

    def send(self, call_id: int, method: str, request: Message) -> None:
        if isinstance(request, pb.TrainRestoreRequest):
            with contextlib.suppress(OSError):
                rank_link.send_folder(self._socket, Path(request.directory))
        super().send(call_id, method, request)

    def _gone(self, last: frame_pb2.Frame | None) -> None:
        how = "is gone" if last is None else how_it_ended(int(last.body))
        self._on_end(self.rank, f"on {self._host} {how}")


def how_it_ended(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
