"""Each Dockerfile's build stage installs, in a fresh venv, what its service needs to start.

There is no Docker engine on the machines that build this project, so the instructions are replayed: COPY into
a scratch folder, RUN with /opt/venv and the working directory replaced. What the base image holds, and the
second stage, remain unproven.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from scripts.evidence_cases import Progress

ROOT = Path(__file__).resolve().parents[2]
VENV = "/opt/venv"


@dataclass(slots=True)
class Replay:
    """A build stage as it stands after the instructions carried out so far."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def carry_out(self, instruction: str, rest: str) -> None:
        """One instruction of a build stage; ValueError for one that cannot be replayed."""
        match instruction:
            case "FROM" | "WORKDIR":
                return
            case "ARG":
                name, _, value = rest.partition("=")
                self.variables.setdefault(name, value)
            case "ENV":
                self.variables.update(dict(pair.split("=", 1) for pair in rest.split()))
            case "COPY":
                source, target = rest.split()
                copy(ROOT / source, self.folder / "src" / target)
            case "RUN":
                self.run(
                    rest.replace(VENV, str(self.folder / "venv")).replace(
                        "python -m", f"{sys.executable} -m", 1
                    )
                )
            case _:
                raise ValueError(f"cannot replay {instruction} {rest}")

    def run(self, command: str) -> str:
        # An argument that is set and empty would hide what this machine has configured.
        variables = {name: value for name, value in self.variables.items() if value}
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder / "src",
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{command}\n{done.stdout[-4000:]}")
        return done.stdout


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def stages(dockerfile: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, with continued lines joined and comments left out."""
    text = re.sub(r"\\\n\s*", "", dockerfile.read_text())
    found: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, rest))
    return found


def replay(dockerfile: Path) -> dict[str, object]:
    """Install as the Dockerfile's build stage does, then let the entry point print its help."""
    build, final = stages(dockerfile)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        stage = Replay(Path(scratch))
        (stage.folder / "src").mkdir()
        for instruction, rest in build:
            stage.carry_out(instruction, rest)
        entry = next(rest for instruction, rest in final if instruction == "ENTRYPOINT")
        _, *arguments = json.loads(entry)
        python = stage.folder / "venv" / "bin" / "python"
        stage.run(" ".join([str(python), *arguments, "--help"]))
        installed = json.loads(stage.run(f"{python} -m pip list --format json"))
        size = sum(path.lstat().st_size for path in (stage.folder / "venv").rglob("*"))
    users = [rest for instruction, rest in final if instruction == "USER"]
    if users[-1:] in ([], ["root"], ["0"]):
        raise RuntimeError(f"{dockerfile} runs as root")
    return {
        "seconds": round(time.monotonic() - started, 1),
        "distributions": len(installed),
        "venv_mib": round(size / 2**20),
        "entry_point": arguments,
    }


def run(progress: Progress) -> dict[str, object]:
    found: dict[str, object] = {}
    for dockerfile in sorted(ROOT.glob("services/*/Dockerfile")):
        service = dockerfile.parent.name
        found[service] = progress.part(service, partial(replay, dockerfile))
    return found
