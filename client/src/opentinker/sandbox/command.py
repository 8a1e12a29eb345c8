"""How a jail is started: the command line of bubblewrap, and whether there can be one here at all.

Inside there are /usr (read-only), the jail's own /proc, a small /dev, and two small tmpfs: /work, which is
also /tmp, and /dev/shm. Nothing else: no home, no state directory, no variable of ours, no network, and no
other place to write, for what is no tmpfs of limited size is mounted read-only.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from opentinker.sandbox import seccomp
from opentinker.sandbox.errors import unavailable
from opentinker.sandbox.limits import Limits

INSTALL = "apt-get install bubblewrap"
_KEEPER = Path(__file__).with_name("keeper.py")
_ROOT_LINKS = ("bin", "lib", "lib32", "lib64", "sbin")
_VARIABLES = {
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    # Sets have the same order in every run, so that an episode can be played again.
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/work",
}


_COMPILE = """\
import marshal, sys
sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.buffer.read(), "<keeper>", "exec")))
"""
_START = """\
import marshal, os, sys
control, size, code = int(sys.argv[1]), int(sys.argv[3]), b""
while len(code) < size:
    code += os.read(control, size - len(code)) or sys.exit()
exec(marshal.loads(code))
"""


class Mode(StrEnum):
    """What the limit of processes rests on."""

    SLOT_UID = "SLOT_UID"
    """We are root: each jail runs under a user id of its own, in a user namespace."""
    USER_NAMESPACE = "USER_NAMESPACE"
    """We are not: jails run under our own user id, each in a user namespace that counts for itself."""


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine offers to jails."""

    mode: Mode
    bubblewrap: str
    setpriv: str
    """Drops root; empty where there is nothing to drop."""


@cache
def host() -> Host:
    """What there is. MissingDependency if there can be no jail, naming what to install."""
    if sys.platform != "linux":
        raise unavailable("untrusted code runs in a Linux jail only; there is none on this system")
    if not seccomp.known():
        raise unavailable("there is no filter of system calls for this machine's architecture")
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise unavailable(f"bubblewrap is not installed, and nothing else may run untrusted code: {INSTALL}")
    if os.geteuid() != 0:
        return Host(Mode.USER_NAMESPACE, bubblewrap, "")
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise unavailable(
            "setpriv is not installed, which jails started by root need: apt-get install util-linux"
        )
    return Host(Mode.SLOT_UID, bubblewrap, setpriv)


@cache
def version() -> str:
    """What bubblewrap calls itself."""
    return subprocess.run([host().bubblewrap, "--version"], capture_output=True, text=True).stdout.strip()


def find_python(wanted: Path | None) -> Path:
    """The interpreter inside: the given one; or ours; or the system's, if jailed users cannot reach ours."""
    if wanted is not None:
        if any(wanted.resolve().is_relative_to(taken) for taken in ("/tmp", "/work", "/dev", "/proc")):
            raise ValueError(f"python: {wanted} lies where a jail has folders of its own")
        if not reachable(wanted):
            raise ValueError(f"python: {wanted} is not there or not readable for jailed users")
        return Path(os.path.realpath(wanted))
    own = Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))
    for candidate in (own, Path("/usr/bin/python3"), Path("/usr/local/bin/python3")):
        if reachable(candidate):
            return Path(os.path.realpath(candidate))
    raise unavailable(
        f"jailed users cannot read {own}, and the system has no python3: apt-get install python3"
    )


def reachable(path: Path) -> bool:
    """Whether the user of a jail may read it."""
    if host().mode is Mode.USER_NAMESPACE:
        return os.access(path, os.R_OK)
    try:
        real = Path(os.path.realpath(path, strict=True))
        for folder in real.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return False
        return bool(real.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


@cache
def keeper_code(python: Path) -> bytes:
    """The keeper as that interpreter compiles it; to do so in each jail would take a third of its time."""
    words = [str(python), "-P", "-s", "-S", "-c", _COMPILE]
    done = subprocess.run(words, input=_KEEPER.read_bytes(), capture_output=True, env={})
    if done.returncode != 0 or not done.stdout:
        raise unavailable(f"{python} does not run: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout


def command(
    *,
    uid: int | None,
    python: Path,
    packages: Sequence[Path],
    limits: Limits,
    info: int,
    filter_fd: int,
    control: int,
    report: int,
) -> list[str]:
    """The command line; the numbers are of descriptors that the process inherits."""
    words = unshared(uid)
    # What runs first is process 1: when it ends, the kernel has killed all others before anyone is told.
    words += ["--as-pid-1"]
    for name, value in _VARIABLES.items():
        words += ["--setenv", name, value]
    words += system_folders(python)
    for folder, inside in zip(packages, package_folders(len(packages)), strict=True):
        words += ["--ro-bind", str(folder), inside]
    words += own_folders(limits.disk_bytes)
    words += ["--info-fd", str(info), "--seccomp", str(filter_fd), "--"]
    words += [str(python), "-P", "-s", "-S", "-X", "utf8", "-c", _START]
    words += [str(control), str(report), str(len(keeper_code(python)))]
    return words


def package_folders(count: int) -> list[str]:
    """Where the folders of modules are inside."""
    return [f"/packages/{number}" for number in range(count)]


def unshared(uid: int | None, *, network: bool = False) -> list[str]:
    """The words that take everything away: the machine's namespaces (but for the network, where it is asked
    for), our user, capabilities, variables.
    """
    here = host()
    words: list[str] = []
    if uid is not None:
        words += [here.setpriv, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--"]
    words += [here.bubblewrap, "--unshare-all", "--unshare-user"]
    if network:
        words += ["--share-net"]
    return [
        *words,
        *("--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--hostname", "jail", "--clearenv"),
    ]


def system_folders(python: Path) -> list[str]:
    """The words that show the system's programs and the interpreter, read-only."""
    words = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    for name in _ROOT_LINKS:
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    prefix = python.parent.parent
    if not prefix.is_relative_to("/usr"):
        words += ["--ro-bind", str(prefix), str(prefix)]
    return words


def own_folders(disk_bytes: int) -> list[str]:
    """The words that give it /proc, /dev, and what it may write: two folders of memory. They come last."""
    words = ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/work"):
        words += ["--size", str(disk_bytes), "--tmpfs", folder]
    return [
        *words,
        *("--symlink", "/work", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work"),
    ]
