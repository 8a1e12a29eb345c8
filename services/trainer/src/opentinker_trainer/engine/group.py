"""An engine of several processes: rank 0 serves the front and has the others do what it does.

Rank 0 starts the other ranks as torchrun would (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), in
its own process group, and sends each of them every request; all compute it together. The rendezvous is a
store on a port of the loopback interface that the system chose, and that is listened on before anybody is
told of it.

Ranks that do not agree are of no use: one that dies, or ends a request otherwise than rank 0, ends the group.
The call under way fails with the cause, and the front starts a new group from its checkpoint.
"""

import contextlib
import os
import queue
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from google.protobuf.message import Message
from torch._C._distributed_c10d import Store, TCPStore

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import Handler
from opentinker_kit.logging import configure
from opentinker_trainer.engine.handlers import EngineHandlers
from opentinker_trainer.engine.ranks import Ranks
from opentinkerapi.engine.v1 import frame_pb2
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

FD_VARIABLE = "OPENTINKER_RANK_FD"
_DEVICE_VARIABLE = "OPENTINKER_RANK_DEVICE"
_HOST = "127.0.0.1"
_LENGTH = struct.Struct("<I")
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""A rank may be slow, a dead one is noticed otherwise."""
_CAUSE_S = 5.0
"""How long to look for the rank whose end made a collective call fail."""
_AGREEMENT_S = 30.0
"""How long rank 0 may go on after another rank refused what it still works on."""
_MAY_DIFFER = ("Save",)
"""Methods that only rank 0 can fail: it writes the files, and the policy stays as it is."""


class _Worker:
    """One of the other ranks, as rank 0 sees it."""

    def __init__(
        self, rank: int, count: int, port: int, device: str, on_end: Callable[[int, int], None]
    ) -> None:
        """Start it. `on_end` is told rank and exit status, from a thread."""
        self.rank = rank
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(port),
            FD_VARIABLE: str(theirs.fileno()),
            _DEVICE_VARIABLE: device,
        }
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "opentinker_trainer.engine"],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self.replies: queue.SimpleQueue[frame_pb2.Frame | None] = queue.SimpleQueue()
        """One for each request; None when it is gone."""
        self.refused = threading.Event()
        """Set when a reply is an error."""
        threading.Thread(target=self._read, name=f"rank-{rank}", daemon=True).start()
        threading.Thread(target=lambda: on_end(rank, self.process.wait()), daemon=True).start()

    def send(self, frame: frame_pb2.Frame) -> None:
        with contextlib.suppress(OSError):  # whoever waits for its end is told
            send_frame(self._socket, frame)

    def _read(self) -> None:
        while (frame := receive_frame(self._socket)) is not None:
            if frame.HasField("error"):
                self.refused.set()
            self.replies.put(frame)
        self.replies.put(None)


class Leader:
    """Rank 0: the engine's methods, done by all ranks together."""

    def __init__(self, handlers: EngineHandlers) -> None:
        self._handlers = handlers
        self._workers: list[_Worker] = []
        self._calls = 0
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self.abort: Callable[[ServiceError], None] = lambda error: os._exit(70)
        """Ends this process group, and tells the front why."""

    def table(self) -> Mapping[str, Handler]:
        """Method name -> handler."""
        return {
            method: Handler(handler.request_type, self._together(method, handler))
            for method, handler in self._handlers.table().items()
        }

    def _together(self, method: str, handler: Handler) -> Callable[[Any], Any]:
        def run(request: Any) -> Any:
            if method == "Load" and request.ranks > 1:
                self._start(request.ranks, request.device)
            if not self._workers:
                return handler.run(request)
            return self._run(method, request, handler)

        return run

    def _start(self, count: int, device: str) -> None:
        listener = socket.create_server((_HOST, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            _HOST, port, count, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
        )
        self._workers = [_Worker(rank, count, port, device, self._on_end) for rank in range(1, count)]
        self._handlers.ranks = join(store, 0, count, device)

    def _on_end(self, rank: int, status: int) -> None:
        self._ended.put((rank, status))
        self.abort(self._loss(rank, status))

    def _loss(self, rank: int, status: int) -> ServiceError:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        text = f"rank {rank} of {len(self._workers) + 1} {how}; the group starts again from its checkpoint"
        return ServiceError(Reason.ENGINE_CRASHED, text, retry_after_s=1.0, metadata={"rank": rank})

    def _run(self, method: str, request: Message, handler: Handler) -> Any:
        self._calls += 1
        body = request.SerializeToString()
        for worker in self._workers:
            worker.refused.clear()
            worker.send(frame_pb2.Frame(call_id=self._calls, method=method, body=body))
        done = threading.Event()
        threading.Thread(target=self._watch, args=(method, done), daemon=True).start()
        failure: ServiceError | None = None
        answer: Any = None
        try:
            answer = handler.run(request)
        except ServiceError as error:
            failure = error
        except Exception as error:
            log.exception("a rank failed", rank=0, method=method)
            self._give_up(error)
        finally:
            done.set()
        for worker in self._workers:
            reply = worker.replies.get()
            if reply is None:
                self._give_up(ConnectionError(f"rank {worker.rank} is gone"))
            refused = reply.HasField("error")
            if refused != (failure is not None) and (refused or method not in _MAY_DIFFER):
                said = ServiceError.from_status(reply.error).message if refused else "done"
                self._disagree(method, worker.rank, said, failure.message if failure else "done")
        if failure is not None:
            raise failure
        return answer

    def _watch(self, method: str, done: threading.Event) -> None:
        """End the group if a rank has refused what this one cannot end without it."""
        while not done.wait(1.0):
            refused = [worker.rank for worker in self._workers if worker.refused.is_set()]
            if refused and not done.wait(_AGREEMENT_S):
                self._disagree(method, refused[0], "an error", "nothing yet")

    def _disagree(self, method: str, rank: int, theirs: str, ours: str) -> NoReturn:
        text = f"rank {rank} ended {method} with {theirs!r}, rank 0 with {ours!r}"
        log.error("ranks disagree", method=method, rank=rank, theirs=theirs, ours=ours)
        self.abort(ServiceError(Reason.ENGINE_CRASHED, text, retry_after_s=1.0))
        _wait_for_the_end()

    def _give_up(self, error: Exception) -> NoReturn:
        """End the group after a failure of this rank, which the end of another one may have caused."""
        try:
            self._ended.get(timeout=_CAUSE_S)
        except queue.Empty:
            text = f"rank 0 of {len(self._workers) + 1} failed: {type(error).__name__}"
            self.abort(ServiceError(Reason.ENGINE_CRASHED, text, retry_after_s=1.0))
        _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    """The call must not answer any more: this process is being ended by another thread."""
    while True:
        time.sleep(1.0)


def run_worker(fd: int) -> None:
    """Be one of the other ranks: do what rank 0 says until it is gone. Never returns."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configure(service=f"engine-rank-{rank}")
    connection = socket.socket(fileno=fd)
    threading.Thread(target=_exit_with, args=(connection.fileno(),), name="leader", daemon=True).start()
    handlers = EngineHandlers()
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), count, is_master=False)
    handlers.ranks = join(store, rank, count, os.environ[_DEVICE_VARIABLE])
    table = handlers.table()
    while (frame := receive_frame(connection)) is not None:
        handler = table[frame.method]
        reply = frame_pb2.Frame(call_id=frame.call_id, end=True)
        try:
            handler.run(handler.request_type.FromString(frame.body))
        except ServiceError as error:
            reply.error.CopyFrom(error.to_status())
        except Exception:
            # Rank 0 waits in a collective call that this one will not make: only its end helps.
            log.exception("a rank failed", rank=rank, method=frame.method)
            os._exit(1)
        send_frame(connection, reply)
    os._exit(0)


def join(store: Store, rank: int, count: int, device: str = "cpu") -> Ranks:
    """Meet the other ranks: through NCCL for what lies on GPUs, through gloo for the rest."""
    # All ranks are on this host; a host's own name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_COLLECTIVE_TIMEOUT)
    return Ranks(rank, count)


def send_frame(connection: socket.socket, frame: frame_pb2.Frame) -> None:
    """Write a frame, its length before it. OSError."""
    data = frame.SerializeToString()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(connection: socket.socket) -> frame_pb2.Frame | None:
    """The next frame, or None at the end."""
    head = _receive(connection, _LENGTH.size)
    data = None if head is None else _receive(connection, _LENGTH.unpack(head)[0])
    return None if data is None else frame_pb2.Frame.FromString(data)


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


def _exit_with(fd: int) -> None:
    """End when rank 0 does, whatever this rank waits for."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(70)
