"""A folder or wheel on the user's disk as a package that env_host takes.

What a package says of itself stands in its pyproject.toml:

    [project]
    name = "my-game"
    requires-python = ">=3.11"
    dependencies = ["numpy>=2"]

    [tool.opentinker]
    environment = "my_game:MyGame"

The same files always give the same bytes, so that an upload that is repeated is no new version.
"""

import io
import re
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker import errors

ARCHIVE_BYTES = 8 << 20
_LEFT_OUT = {"__pycache__", "node_modules", "build", "dist", "venv"}
_OURS = re.compile(r"opentinker([\s\[<>=!~;]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Packed:
    """What is uploaded."""

    name: str
    target: str
    requirements: tuple[str, ...]
    requires_python: str
    wheel: str
    archive: bytes


def pack(path: Path, *, name: str = "", target: str = "", requirements: Sequence[str] = ()) -> Packed:
    """Read a folder or a wheel. What is given goes before what its pyproject.toml says, requirements are
    added to its own. InvalidArgument says what is missing.
    """
    if path.is_file() and path.suffix == ".whl":
        archive, found = path.read_bytes(), {}
        wheel, default_name = path.name, path.name.split("-")[0]
    elif path.is_dir():
        found = _pyproject(path)
        archive = _zip(path)
        wheel, default_name = "", str(found.get("project", {}).get("name", "")) or path.resolve().name
    else:
        raise errors.invalid("folder", f"{path} is neither a folder nor a wheel")
    own = found.get("project", {})
    target = target or str(found.get("tool", {}).get("opentinker", {}).get("environment", ""))
    if not target:
        raise errors.invalid(
            "target",
            'say which class it is: --target module:Class, or environment = "module:Class" below '
            "[tool.opentinker] in its pyproject.toml",
        )
    wanted = [*own.get("dependencies", ()), *requirements]
    return Packed(
        name=name or re.sub(r"[^a-z0-9_.-]", "-", default_name.lower()),
        target=target,
        # The host's own is used, as in all workers.
        requirements=tuple(dict.fromkeys(each for each in wanted if not _OURS.match(each))),
        requires_python=str(own.get("requires-python", "")),
        wheel=wheel,
        archive=archive,
    )


def _pyproject(folder: Path) -> dict[str, Any]:
    path = folder / "pyproject.toml"
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise errors.invalid("folder", f"{path} cannot be read: {error}") from None


def _zip(folder: Path) -> bytes:
    buffer = io.BytesIO()
    sizes: dict[str, int] = {}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            data = path.read_bytes()
            sizes[name] = len(data)
            # Without times: they are not part of what it is.
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    if not sizes:
        raise errors.invalid("folder", f"{folder} has no files")
    if (size := buffer.tell()) > ARCHIVE_BYTES:
        largest = ", ".join(sorted(sizes, key=sizes.__getitem__)[:-4:-1])
        text = f"{folder} packs to {size} bytes, and hosts take {ARCHIVE_BYTES}; largest: {largest}"
        raise errors.invalid("folder", text)
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _LEFT_OUT or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise errors.invalid("folder", f"{path} is a link; a package holds files only")
        if path.is_dir():
            yield from _files(path)
        elif path.is_file():
            yield path
