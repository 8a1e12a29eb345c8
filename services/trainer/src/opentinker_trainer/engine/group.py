"""An engine of several processes: rank 0 serves the front and has the others do what it does.

Rank 0 starts the other ranks as torchrun would (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), in
its own process group, and sends each of them every request; all compute it together. The rendezvous is a
store on a port of the loopback interface that the system chose, and that is listened on before anybody is
told of it. With rank hosts on other machines (`rank_link`) it has those start the ranks, and listens where
they reach it.

Ranks that do not agree are of no use: one that dies, or ends a request otherwise than rank 0, ends the group.
The call under way fails with the cause, and the front starts a new group from its checkpoint.
"""

import os
import queue
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from google.protobuf.message import Message
from torch._C._distributed_c10d import Store, TCPStore

from opentinker_kit.errors import ServiceError
from opentinker_kit.frames import Handler
from opentinker_kit.logging import configure
from opentinker_kit.settings import read_secret
from opentinker_trainer import rank_link
from opentinker_trainer.engine.handlers import EngineHandlers
from opentinker_trainer.engine.ranks import Ranks
from opentinker_trainer.engine.workers import LocalWorker, RemoteWorker, Worker
from opentinker_trainer.rank_link import RankStart, receive_frame, send_frame
from opentinkerapi.engine.v1 import frame_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_HOST = "127.0.0.1"
_COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""A rank may be slow, a dead one is noticed otherwise."""
_CAUSE_S = 5.0
"""How long to look for the rank whose end made a collective call fail."""
_AGREEMENT_S = 30.0
"""How long rank 0 may go on after another rank refused what it still works on."""
_MAY_DIFFER = ("Save",)
"""Methods that only rank 0 can fail: it writes the files, and the policy stays as it is."""


class Leader:
    """Rank 0: the engine's methods, done by all ranks together."""

    def __init__(self, handlers: EngineHandlers) -> None:
        self._handlers = handlers
        self._workers: list[Worker] = []
        self._calls = 0
        self._ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
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
        encoded = os.environ.get(rank_link.HOSTS_VARIABLE)
        hosts = None if encoded is None else rank_link.RankHosts.decode(encoded)
        address = _HOST if hosts is None else hosts.address
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            address, port, count, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
        )
        env = {name: os.environ[name] for name in rank_link.PASSED_VARIABLES if name in os.environ}
        starts = [RankStart(rank, count, address, port, device, env) for rank in range(1, count)]
        if hosts is None:
            self._workers = [LocalWorker(start, self._on_end) for start in starts]
        else:
            self._workers = self._reach(starts, hosts)
        self._handlers.ranks = join(store, 0, count, device, address=address)

    def _reach(self, starts: Sequence[RankStart], hosts: rank_link.RankHosts) -> list[Worker]:
        key = read_secret(Path(hosts.key_file))
        try:
            return [
                RemoteWorker(start, host, key, self._on_end)
                for start, host in zip(starts, hosts.hosts, strict=True)
            ]
        except rank_link.LinkError as error:
            # Those that were reached are in vain: they wait for one that never comes.
            self.abort(ServiceError(Reason.ENGINE_CRASHED, str(error), retry_after_s=5.0))
            _wait_for_the_end()

    def _on_end(self, rank: int, how: str) -> None:
        self._ended.put((rank, how))
        self.abort(self._loss(rank, how))

    def _loss(self, rank: int, how: str) -> ServiceError:
        text = f"rank {rank} of {len(self._workers) + 1} {how}; the group starts again from its checkpoint"
        return ServiceError(Reason.ENGINE_CRASHED, text, retry_after_s=1.0, metadata={"rank": rank})

    def _run(self, method: str, request: Message, handler: Handler) -> Any:
        self._calls += 1
        for worker in self._workers:
            worker.refused.clear()
            worker.send(self._calls, method, request)
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
    handlers.ranks = join(
        store,
        rank,
        count,
        os.environ[rank_link.DEVICE_VARIABLE],
        local_rank=int(os.environ["LOCAL_RANK"]),
        address=os.environ.get(rank_link.ADDRESS_VARIABLE, _HOST),
    )
    table = handlers.table()
    kept = Path(os.environ.get(rank_link.FOLDER_VARIABLE, ""))
    while (frame := receive_frame(connection)) is not None:
        if frame.method in (rank_link.FOLDER, rank_link.FILE):
            _keep(frame, kept)
            continue
        handler = table[frame.method]
        reply = frame_pb2.Frame(call_id=frame.call_id, end=True)
        try:
            request = handler.request_type.FromString(frame.body)
            if isinstance(request, pb.TrainRestoreRequest) and kept.name:
                request.directory = str(kept)
            handler.run(request)
        except ServiceError as error:
            reply.error.CopyFrom(error.to_status())
        except Exception:
            # Rank 0 waits in a collective call that this one will not make: only its end helps.
            log.exception("a rank failed", rank=rank, method=frame.method)
            os._exit(1)
        send_frame(connection, reply)
    os._exit(0)


def join(
    store: Store,
    rank: int,
    count: int,
    device: str = "cpu",
    *,
    local_rank: int | None = None,
    address: str = _HOST,
) -> Ranks:
    """Meet the other ranks: through NCCL for what lies on GPUs, through gloo for the rest.

    `local_rank` is the GPU of this process, by default its rank; `address` what this machine is to others.
    """
    # Named, because a host's own name need not resolve.
    interface = "lo" if address.startswith("127.") else rank_link.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    ranks = Ranks(rank, count, rank if local_rank is None else local_rank)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(ranks.local)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_COLLECTIVE_TIMEOUT)
    return ranks


def _keep(frame: frame_pb2.Frame, folder: Path) -> None:
    """Put down what rank 0 sent of its files."""
    if frame.method == rank_link.FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        return
    name, _, data = frame.body.partition(b"\n")
    with (folder / Path(name.decode()).name).open("ab") as file:
        file.write(data)


def _exit_with(fd: int) -> None:
    """End when rank 0 does, whatever this rank waits for."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(70)
