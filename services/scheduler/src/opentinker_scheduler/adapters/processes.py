"""Servers as processes of this host: each leads a session of its own and logs to its own file. A restarted
scheduler finds it again by its pid, its start time and the settings file it was started with.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from opentinker_kit.files import write_json
from opentinker_kit.settings import ServerSettings
from opentinker_scheduler.domain.logs import about_nobody
from opentinker_scheduler.domain.model import Server
from opentinker_scheduler.domain.nodes import Node, id_of
from opentinker_scheduler.launcher_ports import OnExit, Started
from opentinker_scheduler.log_ports import LogPart

log = structlog.get_logger()

SETTINGS = "settings.json"
LOG = "server.log"
_KILL_WAIT_S = 5.0
_KEPT_FOLDERS = 16
_TAIL_BYTES, _TAIL_LINES, _TAIL_CHARS = 2**18, 15, 1_200
_GPU_WAIT_S, _LOOK_S = 60.0, 0.05
"""A killed process may take long to give back what it had on GPUs."""
_START_SLACK_S = 2.0
"""Start times read by different processes differ where the wall clock was adjusted in between."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start servers."""

    directory: Path
    """One folder for each server goes here."""
    python: str
    modules: Mapping[str, str]
    """What `python -m` runs, by role."""
    settings_for: Callable[[Server, Path], Mapping[str, Any]]
    """The settings of a server, given its folder."""
    pass_fds: Sequence[int] = ()
    node: Node | None = None
    """This host; None where its GPUs are not known."""
    gives_gpus: bool = False
    """Whether a server sees the GPUs that it was given and no others."""


@dataclass(slots=True)
class _Process:
    started: Started
    pidfd: int
    child: subprocess.Popen[bytes] | None
    """None where an earlier scheduler started it."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class ProcessLauncher:
    """See `launcher_ports.Launcher`. Used from one event loop."""

    def __init__(self, recipe: Recipe, on_exit: OnExit) -> None:
        self._recipe = recipe
        self._on_exit = on_exit
        self._processes: dict[str, _Process] = {}
        self._devices: dict[str, frozenset[str]] = {}
        """GPUs of processes that run or are being started."""

    @property
    def name(self) -> str:
        return "process"

    @property
    def can_launch(self) -> bool:
        return True

    def nodes(self) -> Sequence[Node]:
        return () if self._recipe.node is None else (self._recipe.node,)

    async def start(self, server: Server) -> Started:
        if server.id in self._processes:
            return self._processes[server.id].started
        await self._until_free(server)
        self._devices[server.id] = frozenset(server.devices)
        # Whoever gives up waiting must not leave a process behind that is not watched.
        return await asyncio.shield(asyncio.create_task(self._start(server)))

    async def _start(self, server: Server) -> Started:
        folder = self._recipe.directory / server.id
        try:
            child = await asyncio.to_thread(self._spawn, server, folder)
            started = Started(child.pid, _start_time(child.pid), folder / LOG)
        except BaseException:
            self._devices.pop(server.id, None)
            raise
        self._watch(server.id, started, child)
        log.info("started", server=server.name, role=server.role, pid=child.pid, log=str(started.log_path))
        return started

    async def _until_free(self, server: Server) -> None:
        """Wait until no process has the server's GPUs: those of one that was given up may still be ending."""
        for _ in range(round(_GPU_WAIT_S / _LOOK_S)):
            others = [
                i for i, has in self._devices.items() if i != server.id and not has.isdisjoint(server.devices)
            ]
            if not others:
                return
            await asyncio.sleep(_LOOK_S)
        raise OSError(f"its GPUs are still held by the process of servers/{others[0]}")

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        expected = {server.id: server for server in servers}
        for server_id, process in self._found():
            server = expected.get(server_id)
            if server is not None and server_id not in self._processes and _same(server, process):
                folder = self._recipe.directory / server_id
                started = Started(process.pid, process.create_time(), folder / LOG)
                self._devices[server_id] = frozenset(server.devices)
                self._watch(server_id, started, None)
            else:
                log.warning("ending a process that no server record claims", pid=process.pid)
                _kill_group(process.pid)
        for server in servers:
            if server.pid and server.id not in self._processes:
                _kill_orphans(server)
        return {server_id: process.started for server_id, process in self._processes.items()}

    async def stop(self, server_id: str, grace_s: float) -> None:
        process = self._processes.get(server_id)
        if process is None:
            return
        pid = process.started.pid
        if grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if await _within(process.gone, grace_s):
                return
        _kill_group(pid)
        if not await _within(process.gone, _KILL_WAIT_S):
            log.error("a process does not end", server=server_id, pid=pid)

    def watched(self) -> Collection[str]:
        return tuple(self._processes)

    def waits(self) -> Mapping[str, str]:
        return {}

    def log_tail(self, server_id: str) -> str:
        return tail(self._recipe.directory / server_id / LOG)

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        return await asyncio.to_thread(read_part, self._recipe.directory / server_id / LOG, offset, limit)

    def close(self) -> None:
        for process in self._processes.values():
            self._unwatch(process)
        self._processes.clear()
        self._devices.clear()

    def _spawn(self, server: Server, folder: Path) -> subprocess.Popen[bytes]:
        forget_old_folders(self._recipe.directory, self._processes)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / SETTINGS
        settings = dict(self._recipe.settings_for(server, folder))
        write_json(path, settings, mode=0o600)
        argv = [self._recipe.python, "-P", "-m", self._recipe.modules[server.role], "--settings", str(path)]
        env = environment(settings) | self._visible(server)
        with (folder / LOG).open("ab") as output:
            return subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=self._recipe.pass_fds,
            )

    def _visible(self, server: Server) -> dict[str, str]:
        """What says to a process which GPUs it has."""
        if not self._recipe.gives_gpus:
            return {}
        ids = ",".join(map(id_of, server.devices))
        # ROCm reads both names. ROCR_VISIBLE_DEVICES is left as it is: HIP counts among what that one leaves.
        return {"CUDA_VISIBLE_DEVICES": ids, "HIP_VISIBLE_DEVICES": ids}

    def _watch(self, server_id: str, started: Started, child: subprocess.Popen[bytes] | None) -> None:
        process = _Process(started, os.pidfd_open(started.pid), child)
        self._processes[server_id] = process
        loop = asyncio.get_running_loop()
        loop.add_reader(process.pidfd, self._ended, server_id)

    def _ended(self, server_id: str) -> None:
        process = self._processes.pop(server_id)
        self._devices.pop(server_id, None)
        self._unwatch(process)
        code = None if process.child is None else process.child.wait()
        # What it left behind, engines above all, ends with it.
        _kill_group(process.started.pid)
        process.gone.set()
        log.info("ended", server=server_id, pid=process.started.pid, exit_code=code)
        self._on_exit(server_id, code)

    def _unwatch(self, process: _Process) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)

    def _found(self) -> Iterator[tuple[str, psutil.Process]]:
        """Processes that were started from a settings file of this directory, by server id."""
        root = self._recipe.directory.absolute()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                argv = process.cmdline()
                if process.status() == psutil.STATUS_ZOMBIE or "--settings" not in argv[:-1]:
                    continue
                path = Path(argv[argv.index("--settings") + 1])
                if path.name == SETTINGS and path.parent.parent == root:
                    yield path.parent.name, process


class StaticLauncher:
    """Servers register themselves; there is nothing to start and nothing to end."""

    @property
    def name(self) -> str:
        return "static"

    @property
    def can_launch(self) -> bool:
        return False

    def nodes(self) -> Sequence[Node]:
        return ()

    async def start(self, server: Server) -> Started:
        raise OSError(f"{server.name}: this cluster starts no servers (setting launcher)")

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        return {}

    async def stop(self, server_id: str, grace_s: float) -> None:
        return None

    def watched(self) -> Collection[str]:
        return ()

    def waits(self) -> Mapping[str, str]:
        return {}

    def log_tail(self, server_id: str) -> str:
        return ""

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        return None

    def close(self) -> None:
        return None


def forget_old_folders(directory: Path, live: Collection[str]) -> None:
    """Remove what ended servers left behind, except for the newest."""
    if not directory.is_dir():
        return
    folders = [item for item in directory.iterdir() if item.name not in live]
    for folder in sorted(folders, key=_modified)[:-_KEPT_FOLDERS]:
        shutil.rmtree(folder, ignore_errors=True)


def tail(path: Path) -> str:
    """The last lines of a log, without those about one job; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Of a line that lacks its beginning nobody can say what it is about.
    return last_lines(text.partition("\n")[2] if start > 0 else text)


def last_lines(text: str) -> str:
    """What is shown of the end of a log."""
    return "\n".join([*about_nobody(text.splitlines())][-_TAIL_LINES:])[-_TAIL_CHARS:]


def read_part(path: Path, offset: int, limit: int) -> LogPart | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(offset)
            return LogPart(file.read(limit), size)
    except OSError:
        return None


def environment(settings: Collection[str]) -> dict[str, str]:
    """What a server inherits: all but variables that would override its settings file, or that are meant for
    the scheduler itself."""
    kept_back = environment_names(settings)
    return {key: value for key, value in os.environ.items() if key.split("__")[0] not in kept_back}


def environment_names(settings: Collection[str]) -> Collection[str]:
    """The variables that a server must not inherit; of nested ones (`NAME__PART`) the first part."""
    return {f"OPENTINKER_{name.upper()}" for name in (*settings, *ServerSettings.model_fields)}


def this_python() -> str:
    """The interpreter that runs this."""
    return sys.executable


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _start_time(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error as error:
        raise OSError(f"process {pid} ended as it started") from error


def _same(server: Server, process: psutil.Process) -> bool:
    """Whether a found process is the one on record; one that was not recorded in time is taken as it is."""
    if server.pid_start == 0.0:
        return True
    return server.pid == process.pid and abs(server.pid_start - process.create_time()) < _START_SLACK_S


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill_orphans(server: Server) -> None:
    """End what is left of a session whose leader is gone: its members keep the leader's pid as session id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(server.pid).status() != psutil.STATUS_ZOMBIE:
            # The number is someone else's by now.
            return
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            mine = os.getsid(process.pid) == server.pid
            if (
                mine
                and process.pid != server.pid
                and process.create_time() >= server.pid_start - _START_SLACK_S
            ):
                process.kill()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
