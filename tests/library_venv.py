"""Virtual environments for libraries whose pins clash with ours: made on first use, beside the one that tests
run in.

What is installed there already is seen from them too, so that only what is missing or differs is installed.
"""

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def library_python(name: str, *requirements: str) -> Path:
    """The interpreter of an environment with these requirements and everything that this one has."""
    digest = hashlib.sha256(repr((requirements, sys.version)).encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / "libraries" / f"{name}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    python = folder / "bin" / "python"
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "ready").exists():
            return python
        venv.create(folder, with_pip=True, symlinks=True, clear=True)
        ours = sysconfig.get_path("purelib")
        # `addsitedir`, so that the paths which ours adds (sources in place of packages) are added too.
        line = f"import site; site.addsitedir({ours!r})\n"
        (folder / f"lib/python3.{sys.version_info[1]}/site-packages/ours.pth").write_text(line)
        command = [
            str(python),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            *requirements,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, f"{name} cannot be installed:\n{done.stdout[-4000:]}"
        (folder / "ready").touch()
    return python
