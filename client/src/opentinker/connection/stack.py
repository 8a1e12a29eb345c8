"""The embedded stack: a supervised child of this process, or one that runs already.

The stack is another distribution (`opentinker_local`) that this one never imports: it is started as a
program and speaks through its state directory, as that package's README lays down. An owned stack ends when
the write end of a pipe closes that only its owner holds, so it cannot outlive this process, however this
ends.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker import errors
from opentinker.connection.notices import Say

MODULE = "opentinker_local"
STATE_DIR_VARIABLE = "OPENTINKER_STATE_DIR"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.02
DISPLACED = 3
"""Exit code of a supervisor that found another one holding the directory."""

Settings = Mapping[str, Mapping[str, Any]]
"""Settings by part of the stack ("scheduler", "env_host"), over its own."""


@dataclass(slots=True)
class EmbeddedStack:
    """A stack that is ready. `child` where this process started it and owns it."""

    state_dir: Path
    info: Mapping[str, Any]
    child: "subprocess.Popen[bytes] | None" = None
    owner_fd: int | None = field(default=None, repr=False)

    def locate(self) -> str:
        """Where its scheduler is."""
        current = read_info(self.state_dir)
        if current is not None:
            self.info = current
        return str(self.info["scheduler"])

    @property
    def key(self) -> str:
        """The bootstrap key."""
        return Path(self.info["bootstrap_key_file"]).read_text().strip()

    def obituary(self) -> str | None:
        """Why nobody will answer any more, or None while the stack lives."""
        if self.child is not None and self.child.poll() is not None:
            code, why = self.child.returncode, _why_it_ended(self.state_dir, self.child.pid)
            return f"the embedded stack has ended (code {code}): {why}; see {log_path(self.state_dir)}"
        if self.child is None and holder(self.state_dir) is None:
            return f"the embedded stack under {self.state_dir} was stopped, or its owner has ended"
        return None

    def stop(self) -> None:
        """End it, if this process started it, and wait until it is gone."""
        if self.owner_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.owner_fd)
            self.owner_fd = None
        if self.child is None:
            return
        try:
            self.child.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def default_state_dir() -> Path:
    """OPENTINKER_STATE_DIR, or the platform's place for an application's data."""
    named = os.environ.get(STATE_DIR_VARIABLE)
    if named:
        return resolve(named)
    import platformdirs

    return Path(platformdirs.user_data_dir("opentinker"))


def resolve(state_dir: str | Path | None) -> Path:
    """The state directory that was meant."""
    return default_state_dir() if state_dir is None else Path(state_dir).expanduser().resolve()


def log_path(state_dir: Path) -> Path:
    """What the supervisor printed."""
    return state_dir / "supervisor.log"


def read_info(state_dir: Path) -> dict[str, Any] | None:
    """`stack.json`: there exactly while the stack is ready."""
    try:
        info = json.loads((state_dir / "stack.json").read_text())
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) else None


def holder(state_dir: Path) -> int | None:
    """The pid of the supervisor that holds the directory, or None where no stack runs."""
    path = state_dir / "supervisor.lock"
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(json.loads(path.read_text())["pid"])
        return 0
    except OSError:
        return None


def start_or_attach(state_dir: str | Path | None, settings: Settings, say: Say) -> EmbeddedStack:
    """Use the stack that runs under `state_dir`, or start one that ends with this process."""
    directory = resolve(state_dir)
    if holder(directory) is not None:
        if settings:
            raise errors.invalid(
                "settings", f"a stack runs under {directory} already; stop it to start it otherwise"
            )
        return attach(directory, say)
    reader, writer = os.pipe()
    try:
        child = launch(directory, settings, owner_fd=reader)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    try:
        info = wait_until_ready(directory, child, say)
    except BaseException:
        EmbeddedStack(directory, {}, child, writer).stop()
        raise
    if info is not None:
        return EmbeddedStack(directory, info, child, writer)
    # Somebody else was faster: theirs is used, ours has ended.
    EmbeddedStack(directory, {}, child, writer).stop()
    return attach(directory, say)


def attach(state_dir: Path, say: Say) -> EmbeddedStack:
    """The stack that runs under `state_dir`; one that is starting is waited for."""
    say(f"waiting for the stack under {state_dir}")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and holder(state_dir) is not None:
        info = read_info(state_dir)
        if info is not None:
            return EmbeddedStack(state_dir, info)
        time.sleep(POLL_S)
    raise errors.Unavailable(
        f"the stack under {state_dir} ended, or is not ready; see {log_path(state_dir)}",
        reason=errors.Reason.CONNECTION_LOST,
    )


def launch(state_dir: Path, settings: Settings, *, owner_fd: int | None) -> "subprocess.Popen[bytes]":
    """Start a supervisor. MissingDependency where the package is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise errors.MissingDependency(
            "the embedded stack is not installed; install it with:  pip install 'opentinker[local]'  "
            "or give the address of a cluster to connect()",
            reason=errors.Reason.MISSING_DEPENDENCY,
        )
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-P", "-m", MODULE, "run", "--state-dir", str(state_dir)]
    if owner_fd is not None:
        command += ["--owner-fd", str(owner_fd)]
    if settings:
        path = state_dir / "options.json"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(json.dumps({part: dict(values) for part, values in settings.items()}, default=str))
        command += ["--options", str(path)]
    with log_path(state_dir).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=() if owner_fd is None else (owner_fd,),
            # Ctrl-C at the terminal is the owner's affair; the stack ends by its pipe, in order.
            start_new_session=True,
        )


def wait_until_ready(state_dir: Path, child: "subprocess.Popen[bytes]", say: Say) -> dict[str, Any] | None:
    """Block until the stack is ready; None if another one holds the directory.

    LaunchFailed with the supervisor's own words where it does not start.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        info = read_info(state_dir)
        if info is not None and info.get("supervisor_pid") == child.pid:
            return info
        code = child.poll()
        if code == DISPLACED:
            return None
        if code is not None:
            raise errors.LaunchFailed(
                f"the embedded stack did not start: {_why_it_ended(state_dir, child.pid)}; "
                f"see {log_path(state_dir)}",
                reason=errors.Reason.LAUNCH_FAILED,
            )
        said = _progress(state_dir, child.pid)
        if said:
            say(f"starting the embedded stack: {said[-1]['text']}")
        time.sleep(POLL_S)
    raise errors.LaunchFailed(
        f"the embedded stack was not ready after {START_TIMEOUT_S:.0f} s; see {log_path(state_dir)}",
        reason=errors.Reason.LAUNCH_FAILED,
    )


def stop(state_dir: Path) -> bool:
    """Stop the stack under `state_dir`, whoever started it; False where none runs."""
    pid = holder(state_dir)
    if not pid:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while holder(state_dir) == pid:
        if time.monotonic() > deadline:
            raise errors.DeadlineExceeded(
                f"the supervisor (pid {pid}) of {state_dir} does not stop; see {log_path(state_dir)}",
                reason=errors.Reason.DEADLINE_EXCEEDED,
            )
        time.sleep(POLL_S)
    return True


def _progress(state_dir: Path, pid: int) -> list[dict[str, Any]]:
    """What the supervisor with this pid has said so far."""
    entries: list[dict[str, Any]] = []
    try:
        lines = (state_dir / "progress.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, AttributeError):
            entry = json.loads(line)
            if entry.get("pid") == pid and "text" in entry:
                entries.append(entry)
    return entries


def _why_it_ended(state_dir: Path, pid: int) -> str:
    failures = [entry["text"] for entry in _progress(state_dir, pid) if entry.get("state") == "failed"]
    if failures:
        return str(failures[-1])
    with contextlib.suppress(OSError):
        lines = log_path(state_dir).read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it gave no reason"
