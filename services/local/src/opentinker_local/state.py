"""The state directory of an embedded stack: what lies where, who holds it, and what others may read of it.

    supervisor.lock   held (flock) by the supervisor as long as it lives; holds its pid
    servers.lock      held as long as a server of the stack lives
    progress.jsonl    what the supervisor does, a line each; begins anew with each supervisor
    stack.json        addresses, pids and key files; there exactly while the stack is ready
    keys/             0600 files
    nats/ s3/ scheduler/ env_host/ gateway/     data, settings and logs of each part

Imports nothing but the standard library and small helpers of the kit: the supervisor must start fast.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from opentinker_kit.files import write_json

VERSION = 1
PROBE_S = 0.5
"""Who looks whether a directory is held takes its lock for an instant; a new holder waits for that."""


class StackError(RuntimeError):
    """The stack cannot be started, found or stopped; the text says why and where to look."""


class AlreadyRunning(StackError):
    """Another supervisor holds the state directory."""


class NotRunning(StackError):
    """No supervisor holds the state directory."""


@dataclass(frozen=True, slots=True)
class StackInfo:
    """A stack that is ready. Written to `stack.json`; secrets are named by their files, never held."""

    state_dir: Path
    supervisor_pid: int
    owned: bool
    """It ends with the process that started it."""
    scheduler: str
    """`host:port`, the address that clients connect to."""
    env_host: str
    gateway: str
    """`http://host:port`; started when somebody connects."""
    nats: str
    """URL without the token."""
    s3: str
    """`host:port`."""
    bootstrap_key_file: Path
    service_key_file: Path
    pids: Mapping[str, int] = field(default_factory=dict)
    started_at: str = ""

    def to_json(self) -> dict[str, Any]:
        plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}
        return {"version": VERSION, **plain, "pids": dict(self.pids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """ValueError if another version wrote it."""
        if value.get("version") != VERSION:
            raise ValueError(f"stack.json has version {value.get('version')}, this program reads {VERSION}")
        fields = {key: item for key, item in value.items() if key != "version"}
        for name in ("state_dir", "bootstrap_key_file", "service_key_file"):
            fields[name] = Path(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below the state directory of one stack."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def progress(self) -> Path:
        return self.root / "progress.jsonl"

    @property
    def stack(self) -> Path:
        return self.root / "stack.json"

    @property
    def ports(self) -> Path:
        """Ports of the last start, taken again if they are free."""
        return self.root / "ports.json"

    @property
    def busy(self) -> Path:
        """Locked as long as a server of this stack lives, whatever became of its supervisor."""
        return self.root / "servers.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.root / "supervisor.log"

    def key(self, name: str) -> Path:
        return self.root / "keys" / f"{name}.key"

    def part(self, name: str) -> Path:
        """Where one part keeps its things."""
        return self.root / name

    def make(self) -> None:
        """Make the directory, closed to others."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.root / "keys").mkdir(exist_ok=True, mode=0o700)

    def read_stack(self) -> StackInfo | None:
        """The stack if it is ready. ValueError if the file was written by another version."""
        try:
            return StackInfo.from_json(json.loads(self.stack.read_text()))
        except FileNotFoundError:
            return None

    def write_stack(self, info: StackInfo) -> None:
        write_json(self.stack, info.to_json(), mode=0o600)

    def holder(self) -> int | None:
        """The pid of the supervisor that holds the directory, or None."""
        try:
            with self.lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return self._pid_in_lock()

    def _pid_in_lock(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads(self.lock.read_text())["pid"])
        return 0

    @contextlib.contextmanager
    def hold(self, *, owned: bool) -> Iterator[None]:
        """Hold the directory; AlreadyRunning that says who does. Given up by the kernel however we end."""
        self.make()
        with self.lock.open("a+") as file:
            deadline = time.monotonic() + PROBE_S
            while not try_lock(file.fileno()):
                if time.monotonic() < deadline:
                    time.sleep(PROBE_S / 25)
                    continue
                raise AlreadyRunning(
                    f"another supervisor (pid {self._pid_in_lock()}) holds {self.root}; attach to it, "
                    "stop it with `opentinker down`, or use another state directory"
                )
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "owned": owned}))
            file.flush()
            yield


def try_lock(fd: int) -> bool:
    """Lock the open file behind a descriptor, for all that inherit it; whether it was free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Progress:
    """Tells what the supervisor does: one JSON object a line, for who waits for the stack and for who debugs
    it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def say(self, state: str, text: str, **fields: object) -> None:
        """`state` is starting, ready, restarting, stopping, stopped or failed; `text` is for people."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "pid": os.getpid(), "state": state, "text": text, **fields})
        with contextlib.suppress(OSError), self._path.open("a") as file:
            file.write(line + "\n")


def read_progress(path: Path, pid: int) -> list[dict[str, Any]]:
    """What the supervisor with this pid has said so far."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    entries: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if entry.get("pid") == pid:
                entries.append(entry)
    return entries
