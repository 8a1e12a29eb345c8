"""The embedded stack: a supervised child of this process, or one that runs already.

The stack is another distribution (`opentinker_local`) that this one never imports: it is started as a
program and speaks through its state directory. `stack.json` there says where the scheduler is; the child
ends when the write end of the owner pipe closes, so it cannot outlive this process, however this ends.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker import errors
from opentinker.connection.notices import Say

MODULE = "opentinker_local"
STATE_FILE = "stack.json"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
STATE_DIR_VARIABLE = "OPENTINKER_STATE_DIR"


@dataclass(slots=True)
class EmbeddedStack:
    """A stack under a state directory. `child` where this process started it."""

    state_dir: Path
    child: "subprocess.Popen[bytes] | None" = None
    owner_fd: int | None = None
    _address: str = ""

    def locate(self) -> str:
        """Where its scheduler is now; a scheduler that was restarted may have moved."""
        state = read_state(self.state_dir)
        if state is not None:
            self._address = str(state["scheduler_address"])
        return self._address

    @property
    def key(self) -> str:
        """The bootstrap key."""
        state = read_state(self.state_dir)
        if state is None:
            raise errors.Unavailable(f"the stack under {self.state_dir} has ended", reason=None)
        return Path(state["key_file"]).read_text().strip()

    def obituary(self) -> str | None:
        """Why nobody will answer any more, or None while the stack lives."""
        if self.child is not None and self.child.poll() is not None:
            code, log = self.child.returncode, log_path(self.state_dir)
            return f"the embedded stack ended with code {code}; its log: {log}"
        if self.child is None and read_state(self.state_dir) is None:
            return f"the embedded stack under {self.state_dir} was stopped by its owner"
        return None

    def stop(self) -> None:
        """End it, if this process started it, and wait until it is gone."""
        if self.child is None:
            return
        if self.owner_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.owner_fd)
            self.owner_fd = None
        try:
            self.child.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def default_state_dir() -> Path:
    """OPENTINKER_STATE_DIR, or the platform's place for an application's data."""
    named = os.environ.get(STATE_DIR_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir("opentinker"))


def log_path(state_dir: Path) -> Path:
    """The supervisor's log."""
    return state_dir / "logs" / "supervisor.log"


def read_state(state_dir: Path) -> dict[str, Any] | None:
    """What a stack that runs says about itself; None where none runs."""
    try:
        state = json.loads((state_dir / STATE_FILE).read_text())
        pid = int(state["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return state if isinstance(state, dict) and _alive(pid) else None


def start_or_attach(state_dir: str | Path | None, settings: Mapping[str, Any], say: Say) -> EmbeddedStack:
    """Use the stack that runs under `state_dir`, or start one that ends with this process."""
    directory = Path(state_dir).expanduser().absolute() if state_dir is not None else default_state_dir()
    if read_state(directory) is not None:
        if settings:
            raise errors.invalid(
                "settings", f"a stack runs under {directory} already; stop it to start it otherwise"
            )
        return EmbeddedStack(directory)
    reader, writer = os.pipe()
    try:
        child = launch(directory, settings, owner_fd=reader)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    stack = EmbeddedStack(directory, child, writer)
    try:
        wait_until_ready(directory, child, say)
    except BaseException:
        stack.stop()
        raise
    if (state := read_state(directory)) is not None and int(state["pid"]) != child.pid:
        # Somebody else was faster: theirs is used, ours has ended.
        stack.stop()
        return EmbeddedStack(directory)
    return stack


def launch(
    state_dir: Path, settings: Mapping[str, Any], *, owner_fd: int | None
) -> "subprocess.Popen[bytes]":
    """Start the supervisor. MissingDependency where it is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise errors.MissingDependency(
            "the embedded stack is not installed; install it with:  pip install 'opentinker[local]'  "
            "or give the address of a cluster to connect()",
            reason=errors.Reason.MISSING_DEPENDENCY,
        )
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    log_path(state_dir).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", MODULE, "run", "--state-dir", str(state_dir)]
    if owner_fd is not None:
        command += ["--owner-fd", str(owner_fd)]
    if settings:
        path = state_dir / "settings.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(dict(settings), default=str))
        command += ["--settings", str(path)]
    with log_path(state_dir).open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[] if owner_fd is None else [owner_fd],
            # Ctrl-C at the terminal is this process's affair; the stack ends by its pipe, in order.
            start_new_session=True,
        )


def wait_until_ready(state_dir: Path, child: "subprocess.Popen[bytes]", say: Say) -> None:
    """Block until the stack says where it is. LaunchFailed with the reason and the log where it does not."""
    say("starting the embedded stack")
    started = time.monotonic()
    while time.monotonic() - started < START_TIMEOUT_S:
        if read_state(state_dir) is not None:
            return
        code = child.poll()
        if code is not None:
            raise errors.LaunchFailed(
                f"the embedded stack did not start (code {code}): {_last_line(state_dir)}; "
                f"its log: {log_path(state_dir)}",
                reason=errors.Reason.LAUNCH_FAILED,
            )
        time.sleep(POLL_S)
    raise errors.LaunchFailed(
        f"the embedded stack was not ready after {START_TIMEOUT_S:.0f} s; its log: {log_path(state_dir)}",
        reason=errors.Reason.LAUNCH_FAILED,
    )


def _last_line(state_dir: Path) -> str:
    try:
        lines = log_path(state_dir).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "no reason was given"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
