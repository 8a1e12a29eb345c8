"""Small files that others read: written whole or not at all."""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace `path` by a file with this content; readers see the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = data.encode() if isinstance(data, str) else data
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """`write_atomic` of a JSON document."""
    write_atomic(path, json.dumps(value, indent=1) + "\n", mode)


def make_key_file(path: Path) -> Path:
    """Make a 256-bit key in a 0600 file unless the file is there already; returns `path`."""
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
    return path
