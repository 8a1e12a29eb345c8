"""An env_host of the user's own, with one environment class, as a child of this process.

The host is another distribution (`opentinker_env_host`) that this one never imports: it is started as a
program. Its workers run under this interpreter, where the class and what it needs are installed.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentinker import errors

MODULE = "opentinker_env_host"
START_TIMEOUT_S = 60.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Served:
    """A host that serves."""

    address: str
    name: str
    key_file: Path | None
    """The key that callers need; none on loopback."""
    process: "subprocess.Popen[bytes]"
    log: Path


@contextlib.contextmanager
def serve(
    target: str,
    *,
    name: str,
    path: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 0,
    exclusive: bool = False,
    threads: int | None = None,
    state_dir: Path | None = None,
) -> Iterator[Served]:
    """Start it and wait until it serves; it ends with the block. MissingDependency, InvalidArgument."""
    if importlib.util.find_spec(MODULE) is None:
        raise errors.MissingDependency(
            f"serving needs {MODULE}, which is not installed here: pip install 'opentinker[local]'",
            reason=errors.Reason.MISSING_DEPENDENCY,
        )
    with contextlib.ExitStack() as stack:
        if state_dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opentinker-env-")))
        else:
            folder = state_dir
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ready, log, key_file = folder / "ready.json", folder / "env_host.log", None
        ready.unlink(missing_ok=True)
        environment: dict[str, object] = {"target": target, "path": list(path), "python": sys.executable}
        environment["exclusive"] = exclusive
        if threads is not None:
            environment["threads"] = threads
        settings: dict[str, object] = {
            "environments": {name: environment},
            "listen_host": host,
            "listen_port": port,
            "ready_file": str(ready),
            "state_dir": str(folder),
            "packages": {"enabled": False},
        }
        if host not in _LOOPBACK:
            key_file = _key(folder / "caller.key")
            settings |= {"bootstrap_key_file": str(key_file)}
            settings |= {"service_key_file": str(_key(folder / "service.key"))}
        read, write = os.pipe()
        settings["lifeline_fd"] = read
        given = folder / "settings.json"
        given.write_text(json.dumps(settings))
        given.chmod(0o600)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, "--settings", str(given)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(read,),
                start_new_session=True,
            )
        os.close(read)
        try:
            address = _address(process, ready, log)
            yield Served(address, name, key_file, process, log)
        finally:
            # It drains and ends when the pipe closes.
            os.close(write)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[bytes]", ready: Path, log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if ready.exists():
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(ready.read_text())["address"])
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()[-5:]
            raise errors.invalid("serve", "the host did not start: " + " / ".join(lines))
        time.sleep(0.05)
    raise errors.invalid("serve", f"the host is not ready after {START_TIMEOUT_S:g} s; see {log}")


def _key(path: Path) -> Path:
    if not path.exists():
        path.touch(0o600)
        path.write_text(f"otk_{secrets.token_urlsafe(32)}")
    return path
