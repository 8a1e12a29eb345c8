"""What the Ray launcher has run on a node: one process, its folder, its log and its exit code.

An instance of `NodeAgent` is a Ray actor. The class goes to the nodes by value, so they need Ray and the
distribution of the server that they run, and nothing of the scheduler; hence only the standard library here.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOG, SETTINGS, READY, LOCK = "server.log", "settings.json", "ready.json", "lock"
KEPT_FOLDERS = 16
TAIL_BYTES = 65_536
_READY_S = 60.0
_PR_SET_PDEATHSIG = 1
_KILL_WAIT_S = 5.0


class NodeAgent:
    """One process of a server: its front, or a host of one of its ranks."""

    def __init__(self) -> None:
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._gone: asyncio.Task[int] | None = None
        self._lifeline = -1
        self._lock = -1

    async def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the process, or say again what was started; {"pid", "pid_start", "log_path", "address"}.

        `order` has "cluster" and "name", which make the folder; "argv"; "files", text by name (0600);
        "settings", written as JSON unless None; "drop", variables that the process must not see. In
        argv and settings `{folder}`, `{address}`, `{python}` and `{lifeline}` are filled in. RuntimeError.
        """
        if self._process is None:
            self._folder = _folder(order["cluster"], order["name"])
            self._lock = _locked(self._folder / LOCK)
            for name, text in order["files"].items():
                _write(self._folder / name, text)
            self._spawn(order)
        assert self._process is not None
        if self._gone is None:
            self._gone = asyncio.create_task(asyncio.to_thread(self._process.wait))
        return {
            "pid": self._process.pid,
            "pid_start": self._began,
            "log_path": str(self._folder / LOG),
            "address": _address(),
        }

    async def node(self) -> str:
        """Ray's id of this node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def ready(self) -> dict[str, Any]:
        """What the process wrote into its ready file. RuntimeError with the log's end if it does not come."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if self._code() is not None:
                break
            with contextlib.suppress(OSError, ValueError):
                found: dict[str, Any] = json.loads((self._folder / READY).read_text())
                return found
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self._folder.name} did not come up; its log ends:\n{self._tail()[-1200:]}")

    async def ended(self, within_s: float) -> dict[str, Any]:
        """Wait a while for the end: {"code": None while it runs, "tail": end of the log}."""
        if self._gone is not None:
            await asyncio.wait({self._gone}, timeout=within_s)
        code = self._code()
        if code is not None:
            # What it left behind, engines above all, ends with it.
            self._kill_group()
        return {"code": code, "tail": self._tail()}

    async def read_log(self, offset: int, limit: int) -> tuple[bytes, int]:
        """Some of the log, and how long it is by now."""
        try:
            with (self._folder / LOG).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(offset)
                return file.read(limit), size
        except OSError:
            return b"", 0

    async def stop(self, grace_s: float) -> None:
        """End the process and its group: asked at first, forced after `grace_s`."""
        if self._process is None:
            return
        if grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            if (await self.ended(grace_s))["code"] is not None:
                return
        self._kill_group()
        await self.ended(_KILL_WAIT_S)

    def _spawn(self, order: dict[str, Any]) -> None:
        read_end, self._lifeline = os.pipe()
        known = {
            "folder": str(self._folder),
            "address": _address(),
            "python": sys.executable,
            "lifeline": str(read_end),
        }
        if order["settings"] is not None:
            settings = _filled(order["settings"], known)
            # A number, which text cannot be filled in for.
            settings["lifeline_fd"] = read_end
            _write(self._folder / SETTINGS, json.dumps(settings, indent=1))
        dropped = set(order["drop"])
        env = {
            key: value
            for key, value in os.environ.items()
            # Ray sets the number of threads to the CPUs that an actor is counted as.
            if key.split("__")[0] not in dropped and key != "OMP_NUM_THREADS" and not key.startswith("RAY_")
        }
        try:
            with (self._folder / LOG).open("ab") as output:
                self._process = subprocess.Popen(
                    _filled(order["argv"], known),
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[read_end],
                    preexec_fn=_die_with_agent,
                )
            self._began = time.time()
        except OSError as error:
            raise RuntimeError(f"it cannot be started: {error}") from error
        finally:
            os.close(read_end)

    def _code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _tail(self) -> str:
        with contextlib.suppress(OSError), (self._folder / LOG).open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
            return text.partition("\n")[2] if start > 0 else text
        return ""


def _address() -> str:
    """What this node is to the others."""
    import ray

    return str(ray.util.get_node_ip_address())


def _folder(cluster: str, name: str) -> Path:
    """A new folder of this user's on this node, after the oldest ones of ended processes were removed."""
    ours = Path(tempfile.gettempdir()) / f"opentinker-{os.getuid()}"
    ours.mkdir(exist_ok=True, mode=0o700)
    found = ours.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise RuntimeError(f"{ours} is not a folder of this user's alone; remove it")
    root = ours / cluster
    root.mkdir(exist_ok=True, mode=0o700)
    ended = [one for one in root.iterdir() if not _is_held(one / LOCK)]
    for one in sorted(ended, key=lambda path: path.stat().st_mtime)[:-KEPT_FOLDERS]:
        shutil.rmtree(one, ignore_errors=True)
    folder = root / name
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def _locked(path: Path) -> int:
    """Hold a file for as long as this process lives."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def _is_held(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _die_with_agent() -> None:
    """Have the kernel end the process with the thread of this actor (Linux), lifeline or not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)


def _filled(value: Any, known: dict[str, str]) -> Any:
    """The value with every `{name}` of `known` in its texts replaced."""
    if isinstance(value, str):
        for name, text in known.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, dict):
        return {key: _filled(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, known) for item in value]
    return value
