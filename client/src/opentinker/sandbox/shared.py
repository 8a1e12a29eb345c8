"""`python -m opentinker.sandbox.shared FOLDER`: what jails of env_host need of this installation.

Copies this library and pip into FOLDER, where jailed users can read them wherever ours lie, and says where as
one JSON line: `opentinker`, `pip` (folders to search for modules), `python` (the version inside), or `error`.
A copy is named by its content and made once.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from opentinker.sandbox import command

_ASK = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def main(argv: Sequence[str] | None = None) -> int:
    """Copy and say where."""
    (folder,) = sys.argv[1:] if argv is None else argv
    said: dict[str, str] = {}
    try:
        python = command.find_python(None)
        asked = subprocess.run([str(python), "-S", "-c", _ASK], capture_output=True, text=True, env={})
        said["python"] = asked.stdout.strip()
        said["opentinker"] = str(copy("opentinker", Path(folder)))
        said["pip"] = str(copy("pip", Path(folder))) if importlib.util.find_spec("pip") else ""
    except Exception as error:
        said["error"] = str(error)
    sys.stdout.write(json.dumps(said) + "\n")
    return 1 if "error" in said else 0


def copy(package: str, folder: Path) -> Path:
    """A folder that holds the package, as it is now."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"there is no package {package}")
    (source,) = map(Path, list(spec.submodule_search_locations)[:1])
    target = folder / f"{package}-{digest_of(source)}"
    if target.exists():
        return target
    made = Path(tempfile.mkdtemp(prefix="copy-", dir=folder))
    try:
        shutil.copytree(source, made / package, ignore=_LEFT_OUT)
        for where, _, names in os.walk(made):
            os.chmod(where, 0o755)
            for name in names:
                os.chmod(os.path.join(where, name), 0o644)
        if not target.exists():
            os.rename(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def digest_of(source: Path) -> str:
    """Changes when a file of the package does."""
    digest = hashlib.sha256()
    for where, folders, names in os.walk(source):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for name in sorted(names):
            facts = os.stat(os.path.join(where, name))
            digest.update(f"{where}/{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
