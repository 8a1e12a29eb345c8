"""Measure one claim that the documentation makes, and keep the figures.

Usage: .venv/bin/python scripts/evidence.py CASE | --list

A case is a module in scripts/evidence_cases/ with `run(progress: Progress) -> dict`: its docstring says what
is claimed. What it found goes to docs/evidence/CASE.json with commit, command, date and machine. A case that
is stopped goes on where it was: each part it finished is kept under runs/evidence/CASE/ until it is done.
"""

import argparse
import datetime
import importlib
import json
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that cases are scripts.evidence_cases.*, wherever this was started

from scripts.evidence_cases import Progress  # noqa: E402

EVIDENCE = ROOT / "docs" / "evidence"
CASES = ROOT / "scripts" / "evidence_cases"


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit() -> str:
    """The commit measured, marked if the working tree differs from it (evidence itself does not count)."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/evidence")
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


def machine() -> dict[str, object]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def case_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules([str(CASES)]))


def load(name: str) -> ModuleType:
    return importlib.import_module(f"scripts.evidence_cases.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="?")
    parser.add_argument("--list", action="store_true", help="list the cases")
    arguments = parser.parse_args(argv)
    known = case_names()
    if arguments.list:
        print(*known, sep="\n")
        return 0
    if arguments.case not in known:
        print(f"unknown case {arguments.case!r}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    module, measured = load(arguments.case), commit()
    kept = ROOT / "runs" / "evidence" / arguments.case
    started = datetime.datetime.now(datetime.UTC)
    found = module.run(Progress(kept, measured))
    record = {
        "case": arguments.case,
        "claim": " ".join((module.__doc__ or "").split()),
        "command": f"make evidence CASE={arguments.case}",
        "commit": measured,
        "date": started.isoformat(timespec="seconds"),
        "machine": machine(),
        "found": found,
    }
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    target = EVIDENCE / f"{arguments.case}.json"
    target.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    shutil.rmtree(kept)
    print(f"evidence: {target.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
