"""Starting, finding and stopping an embedded stack from another process.

The client does the same without importing this package; `README.md` says how. What is here is for tests,
benchmarks and tools that have the package anyway.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker_kit.files import write_json
from opentinker_local.state import NotRunning, StackError, StackInfo, StateDir, read_progress

COMMAND = (sys.executable, "-P", "-m", "opentinker_local")
"""What is run as the supervisor."""
_TICK_S = 0.02


@dataclass(slots=True)
class _Started:
    """A stack that this process started."""

    process: subprocess.Popen[bytes]
    pipe: int | None
    """Write end of the pipe by which it belongs to this process."""


_STARTED: dict[Path, _Started] = {}


def start_stack(
    state_dir: Path,
    owned: bool = True,
    *,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    timeout_s: float = 90.0,
    command: Sequence[str] = COMMAND,
) -> StackInfo:
    """Start a stack and wait until it is ready.

    An owned stack ends with this process. `settings` are given to the parts (`scheduler`, `env_host`) over
    their defaults. StackError with the supervisor's own words if it does not start.
    """
    state = StateDir(state_dir.resolve())
    state.make()
    argv = [*command, "run", "--state-dir", str(state.root)]
    if settings:
        path = state.root / "options.json"
        write_json(path, {name: dict(values) for name, values in settings.items()}, mode=0o600)
        argv += ["--options", str(path)]
    read, write = os.pipe()
    if owned:
        argv += ["--owner-fd", str(read)]
    with state.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(read,) if owned else (),
            start_new_session=True,
        )
    os.close(read)
    if not owned:
        os.close(write)
    _STARTED[state.root] = _Started(process, write if owned else None)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        info = state.read_stack()
        if info is not None and info.supervisor_pid == process.pid:
            return info
        if process.poll() is not None:
            raise StackError(_why_it_ended(state, process.pid))
        time.sleep(_TICK_S)
    process.terminate()
    raise StackError(f"the stack in {state.root} is not ready after {timeout_s:.0f} s; see {state.progress}")


def _why_it_ended(state: StateDir, pid: int) -> str:
    failures = [entry["text"] for entry in read_progress(state.progress, pid) if entry["state"] == "failed"]
    if failures:
        return str(failures[-1])
    lines = state.supervisor_log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the supervisor ended without a word; see {state.supervisor_log}"


def attach(state_dir: Path, timeout_s: float = 60.0) -> StackInfo:
    """The stack that runs in a state directory; one that is starting is waited for.

    NotRunning if no supervisor holds the directory.
    """
    state = StateDir(state_dir.resolve())
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if state.holder() is None:
            raise NotRunning(f"no stack runs in {state.root}")
        info = state.read_stack()
        if info is not None:
            return info
        time.sleep(_TICK_S)
    raise StackError(f"the stack in {state.root} is not ready after {timeout_s:.0f} s; see {state.progress}")


def stop_stack(state_dir: Path, timeout_s: float = 60.0) -> bool:
    """Stop the stack in a state directory and wait until it is gone; False if none was running."""
    state = StateDir(state_dir.resolve())
    pid = state.holder()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    started = _STARTED.pop(state.root, None)
    deadline = time.monotonic() + timeout_s
    while state.holder() == pid or _runs(pid):
        if started is not None:
            started.process.poll()
        if time.monotonic() > deadline:
            raise StackError(
                f"the supervisor (pid {pid}) in {state.root} does not stop; see {state.progress}"
            )
        time.sleep(_TICK_S)
    if started is not None and started.pipe is not None:
        os.close(started.pipe)
    return True


def _runs(pid: int) -> bool:
    """Whether a process is there and more than a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def load_options(path: Path | None) -> dict[str, dict[str, Any]]:
    """Settings by part from a JSON file. ValueError if it holds anything else."""
    if path is None:
        return {}
    value = json.loads(path.read_text())
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ValueError(f'{path} must hold settings by part, like {{"scheduler": {{"tick_s": 1}}}}')
    return value
