"""Archives that users upload: looked at before a byte of them is written, and unpacked within bounds.

Nothing in an archive is believed: not its names (no path leads out of the folder), not its sizes (what is
unpacked is counted), not its kinds of files (only plain ones). Nothing is run or imported.
"""

import io
import os
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_FIELD = "archive"
_PART = 1 << 16
_MAX_NAME = 200
_MAX_DEPTH = 16
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """What an archive may unpack to."""

    bytes: int
    files: int


def check(data: bytes, limits: ArchiveLimits) -> None:
    """ServiceError INVALID_FIELD, saying what is wrong with it."""
    with _opened(data) as archive:
        _members(archive, limits)


def unpack(data: bytes, limits: ArchiveLimits, folder: Path) -> None:
    """Write its files into an empty folder. ServiceError INVALID_FIELD."""
    with _opened(data) as archive:
        left = limits.bytes
        for member, path in _members(archive, limits):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                with archive.open(member) as source, os.fdopen(os.open(target, flags, 0o644), "wb") as sink:
                    while part := source.read(_PART):
                        left -= len(part)
                        if left < 0:
                            raise _refused(f"it unpacks to more than {limits.bytes >> 20} MiB")
                        sink.write(part)
            except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
                raise _refused(f"{_shown(member.filename)} cannot be unpacked: {error}") from None
            except FileExistsError:
                raise _refused(f"{_shown(member.filename)} is there twice") from None


def _opened(data: bytes) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise _refused(f"it is no zip: {error}") from None


def _members(archive: zipfile.ZipFile, limits: ArchiveLimits) -> list[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """The files in it and where they go."""
    found: list[tuple[zipfile.ZipInfo, PurePosixPath]] = []
    places: set[PurePosixPath] = set()
    parents: set[PurePosixPath] = set()
    if len(archive.infolist()) > 2 * limits.files:
        raise _refused(f"it holds more than {limits.files} files")
    for member in archive.infolist():
        path = _path(member)
        if member.is_dir():
            continue
        if path in places:
            raise _refused(f"{_shown(member.filename)} is there twice")
        places.add(path)
        parents.update(path.parents)
        found.append((member, path))
    if clash := places & parents:
        raise _refused(f"{_shown(str(min(clash)))} is a file and a folder")
    if not found:
        raise _refused("it holds no file")
    if len(found) > limits.files:
        raise _refused(f"it holds {len(found)} files; at most {limits.files} may be in it")
    size = sum(member.file_size for member, _ in found)
    if size > limits.bytes:
        raise _refused(f"it unpacks to {size} bytes; at most {limits.bytes} are allowed")
    return found


def _path(member: zipfile.ZipInfo) -> PurePosixPath:
    name = member.filename
    path = PurePosixPath(name)
    odd = "\\" in name or not name.isprintable() or ":" in name
    if odd or len(name.encode("utf-8", "replace")) > _MAX_NAME or len(path.parts) > _MAX_DEPTH:
        raise _refused(f"{_shown(name)} is no name for a file")
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise _refused(f"{_shown(name)} leads out of the package")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise _refused(f"{_shown(name)} is a link or a device; only files and folders may be in it")
    if member.flag_bits & 0x1:
        raise _refused(f"{_shown(name)} is encrypted")
    if member.compress_type not in _METHODS:
        raise _refused(f"{_shown(name)} is packed in a way that is not read here; use deflate")
    return path


def _shown(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:77]}...")


def _refused(what: str) -> ServiceError:
    return ServiceError(Reason.INVALID_FIELD, f"the archive is refused: {what}", field=_FIELD)
