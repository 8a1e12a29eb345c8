"""A real env_host for the conformance tests, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentinker_kit.testing.waiting import wait_until_sync


@contextmanager
def running_host(folder: Path, environments: Mapping[str, Any]) -> Iterator[int]:
    """Its port. Workers are started when they are asked for."""
    settings = {
        "environments": environments,
        "state_dir": str(folder / "state"),
        "ready_file": str(folder / "ready.json"),
        "warm_workers": 0,
        "drain_s": 0.5,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "opentinker_env_host", "--settings", str(folder / "settings.json")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            ready = folder / "ready.json"
            wait_until_sync(ready.exists, 60, what=f"env_host is ready; see {folder / 'log'}")
            yield json.loads(ready.read_text())["port"]
        finally:
            process.terminate()
