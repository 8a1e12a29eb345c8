"""How server processes are started and ended, as a Protocol; `adapters/` has the launchers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.log_ports import LogPart


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was started."""

    pid: int
    pid_start: float
    log_path: Path

    def recorded(self, server: Server) -> Server:
        """The server with its process written down."""
        log_path = str(self.log_path)
        return replace(server, pid=self.pid, pid_start=self.pid_start, log_path=log_path)


OnExit = Callable[[str, int | None], None]
"""Called in the event loop with a server's id and its exit code, None where nobody can know it."""


class Launcher(Protocol):
    """Starts and ends server processes."""

    @property
    def name(self) -> str:
        """What `Server.launcher` says of servers it started."""
        ...

    @property
    def can_launch(self) -> bool: ...

    def nodes(self) -> Sequence[Node]:
        """The machines that it starts servers on; empty where it does not know their GPUs."""
        ...

    async def start(self, server: Server) -> Started:
        """Start a server's process, or say again what was started. OSError if that is impossible. Where it is
        cancelled, nothing stays that `watched` does not name."""
        ...

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        """Called once, before anything is started. Watch those of the given servers whose process runs, found
        by pid and start time or by what they were started with. Every other process that an earlier scheduler
        of this cluster started is ended. OSError where that cannot be found out."""
        ...

    async def stop(self, server_id: str, grace_s: float) -> None:
        """End a server and every process of its group: asked at first, forced after `grace_s`."""
        ...

    def watched(self) -> Collection[str]:
        """Servers whose process runs."""
        ...

    def waits(self) -> Mapping[str, str]:
        """What servers that are being started wait for, by server, where that is room for them."""
        ...

    def log_tail(self, server_id: str) -> str:
        """The last lines of a server's log, without those about one job: every job on it is told."""
        ...

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        """A server's log from a byte on, at most `limit` bytes of it. None where no log of it is kept: not
        yet, no more, or never, as its operator keeps it elsewhere."""
        ...

    def close(self) -> None:
        """Stop watching; the processes go on."""
        ...
