"""`python -m opentinker.sandbox.program REQUEST`: one program in a jail, with our standard streams.

For what env_host starts and talks to by itself: the workers of uploaded packages, and the builds of their
virtual environments. This process stays outside and waits. It holds the jail's user id, ends the jail when
what it wrote has grown too large, and dies with its parent; the jail dies with it. Status 125: there was no
jail, and standard error says why.

REQUEST is a JSON object: `argv` ("{python}" in it is the interpreter inside), `folders` (a list of
[outside, inside, writable]), `variables`, `network`, `limits` (see `Bounds`), `parent` (a process id).
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.sandbox import command, seccomp
from opentinker.sandbox.slots import Slot

NO_JAIL = 125
TOO_LARGE = 124
TEMPORARY = "tmp"
"""A folder of this name in one that it may write is gone afterwards."""
LOOK_EVERY_S = 0.5
_PR_SET_PDEATHSIG = 1
# Seen by the interpreter inside before anything else: its limits, then the program itself.
_CONFINE = """\
import os, resource, sys
limits = dict(pair.split("=") for pair in sys.argv[1].split(","))
for name, value in limits.items():
    kind, value = getattr(resource, "RLIMIT_" + name), int(value)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
try:
    open("/proc/self/oom_score_adj", "w").write("1000")
except OSError:
    pass
os.execv(sys.argv[2], sys.argv[2:])
"""
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the program may use."""

    memory_bytes: int
    """Address space of each process."""
    processes: int
    """Processes and threads at once."""
    open_files: int = 1024
    disk_bytes: int = 64 << 20
    """Size of its working folder and of /dev/shm, held in memory."""
    folder_bytes: int = 2 << 30
    """What may lie in the folders that it may write, and the largest file of all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run it to its end; its status."""
    (text,) = sys.argv[1:] if argv is None else argv
    request = json.loads(text)
    _die_with(int(request["parent"]))
    bounds = Bounds(**request["limits"])
    folders = [(Path(out), str(inside), bool(writable)) for out, inside, writable in request["folders"]]
    try:
        python = command.find_python(None)
        slot = Slot() if command.host().mode is command.Mode.SLOT_UID else None
    except Exception as error:
        sys.stderr.write(f"{error}\n")
        return NO_JAIL
    written = [out for out, _, writable in folders if writable]
    try:
        for folder in written:
            _give(folder, slot)
        filter_fd = seccomp.readable()
        words = _words(request, bounds, folders, python, slot, filter_fd)
        process = subprocess.Popen(words, pass_fds=(filter_fd,), env={}, cwd="/")
        os.close(filter_fd)
        return _wait(process, written, bounds)
    finally:
        for folder in written:
            _take_back(folder)
            shutil.rmtree(folder / TEMPORARY, ignore_errors=True)
        if slot is not None:
            slot.free()


def _words(
    request: Mapping[str, Any],
    bounds: Bounds,
    folders: Sequence[tuple[Path, str, bool]],
    python: Path,
    slot: Slot | None,
    filter_fd: int,
) -> list[str]:
    network = bool(request["network"])
    words = command.unshared(slot.uid if slot is not None else None, network=network)
    for name, value in request["variables"].items():
        words += ["--setenv", name, value]
    words += command.system_folders(python)
    if network:
        for name in _NETWORK_FILES:
            words += ["--ro-bind-try", os.path.realpath(name), name]
    for outside, inside, writable in folders:
        words += ["--bind" if writable else "--ro-bind", str(outside), inside]
    words += command.own_folders(bounds.disk_bytes)
    limits = {
        "AS": bounds.memory_bytes,
        # bubblewrap's own are two of them.
        "NPROC": bounds.processes + 2,
        "NOFILE": bounds.open_files,
        "FSIZE": bounds.folder_bytes,
        "CORE": 0,
    }
    told = ",".join(f"{name}={value}" for name, value in limits.items())
    program = [str(python) if word == "{python}" else str(word) for word in request["argv"]]
    words += ["--seccomp", str(filter_fd), "--", str(python), "-P", "-S", "-c", _CONFINE, told]
    return [*words, *program]


def _wait(process: "subprocess.Popen[bytes]", written: Sequence[Path], bounds: Bounds) -> int:
    while True:
        try:
            status = process.wait(LOOK_EVERY_S if written else None)
        except subprocess.TimeoutExpired:
            if sum(map(size_of, written)) <= bounds.folder_bytes:
                continue
            process.kill()
            process.wait()
            sys.stderr.write(f"it wrote more than {bounds.folder_bytes >> 20} MiB and was ended\n")
            return TOO_LARGE
        return status if status >= 0 else 128 - status


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder that others may change meanwhile. Links are not followed."""
    return sum(facts.st_size for _, facts in _walk(folder))


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    yield str(folder), os.lstat(folder)
    for where, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(where, name)
            try:
                yield path, os.lstat(path)
            except OSError:
                continue


def _give(folder: Path, slot: Slot | None) -> None:
    if slot is not None:
        for path, _ in _walk(folder):
            os.lchown(path, slot.uid, slot.uid)


def _take_back(folder: Path) -> None:
    """Nobody but us can change it afterwards, and nothing in it gives rights to who runs it."""
    for path, facts in _walk(folder):
        os.lchown(path, os.geteuid(), os.getegid())
        if not os.path.islink(path):
            os.chmod(path, (facts.st_mode & 0o555) | 0o644 | (0o111 if os.path.isdir(path) else 0))


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent and os.getppid() != parent:
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
