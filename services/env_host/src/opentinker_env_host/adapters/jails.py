"""Programs in jails, as command lines: the host runs no untrusted code and imports nothing that does.

The program that makes the jail (`opentinker.sandbox.program`) belongs to the client library; it waits
outside, and what it started dies with it.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import stat
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

PROGRAM = "opentinker.sandbox.program"
SHARED = "opentinker.sandbox.shared"
PYTHON = "{python}"
"""In a command line: the interpreter inside."""
_SHARE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class JailedProgram:
    """How a program runs in a jail."""

    python: Path
    """Our interpreter, which makes the jail."""
    folders: tuple[tuple[Path, str, bool], ...]
    """Outside, inside, whether it may write there."""
    limits: Mapping[str, int]
    variables: Mapping[str, str] = field(default_factory=dict)
    network: bool = False

    def wrap(self, words: list[str]) -> list[str]:
        """The command line that runs these words inside."""
        request = {
            "argv": words,
            "folders": [[str(outside), inside, writable] for outside, inside, writable in self.folders],
            "variables": dict(self.variables),
            "network": self.network,
            "limits": dict(self.limits),
            "parent": os.getpid(),
        }
        return [str(self.python), "-P", "-m", PROGRAM, json.dumps(request)]


@dataclass(frozen=True, slots=True)
class Shared:
    """What jails need of this installation, where jailed users can read it."""

    opentinker: Path
    pip: Path | None
    python: str
    """The version of the interpreter inside."""


async def share(python: Path, folder: Path, variables: Mapping[str, str]) -> Shared:
    """Copy it. ServiceError MISSING_DEPENDENCY where there can be no jail."""
    words = [str(python), "-P", "-m", SHARED, str(folder)]
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, env=dict(variables)
        )
    except OSError as error:
        raise missing(f"{python}: {error.strerror}") from None
    try:
        async with asyncio.timeout(_SHARE_TIMEOUT_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        raise missing(f"no answer within {_SHARE_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        said: dict[str, Any] = json.loads(printed)
    except ValueError:
        raise missing(f"{python} has no {SHARED} that works") from None
    if "error" in said:
        raise missing(str(said["error"]))
    return Shared(Path(said["opentinker"]), Path(said["pip"]) if said["pip"] else None, str(said["python"]))


def missing(why: str) -> ServiceError:
    """Uploaded packages run in jails or not at all."""
    return ServiceError(Reason.MISSING_DEPENDENCY, f"uploaded environments cannot run here: {why}")


def open_folder(wanted: Path | None, state_dir: Path) -> Path:
    """A folder that jailed users can read, made if it is not there."""
    folder = wanted if wanted is not None else default_folder(state_dir)
    folder.mkdir(parents=True, exist_ok=True, mode=0o711)
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise missing(f"{folder} is not a folder of our own; name another one as packages.build_dir")
    os.chmod(folder, 0o711)
    return folder.resolve()


def default_folder(state_dir: Path) -> Path:
    """One in the state directory, or, for root, whose jails have other users, one in /var/tmp: the way to a
    state directory is often closed to others.
    """
    if os.geteuid() != 0:
        return state_dir / "packages" / "built"
    mark = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]
    return Path("/var/tmp") / f"opentinker-packages-{mark}"
