"""Uploaded packages on disk, below the state directory: what a host that is started again has.

    packages/p-{project}/{name}/next              the number of the next version; never falls
    packages/p-{project}/{name}/{number}/record.json, archive.zip, result.json

A version is written beside its place, synchronised, and moved there whole before its upload is answered: what
has been acknowledged is there, and what is there is complete.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import structlog

from opentinker_env_host.domain.packages import Package, PackageSpec, PackageState
from opentinker_env_host.ports import EnvironmentFacts
from opentinker_kit.errors import ServiceError
from opentinker_kit.files import write_atomic, write_json
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_ARCHIVE, _RECORD, _RESULT, _NEXT = "archive.zip", "record.json", "result.json", "next"


def project_folder(project: str) -> str:
    """A file name for a project's id, whatever that is."""
    return f"p-{quote(project, safe='')}"


class PackageStore:
    """See the module's text. Calls block."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def load(self) -> list[Package]:
        """All versions of all projects."""
        found: list[Package] = []
        for record in sorted(self._root.glob(f"p-*/*/*/{_RECORD}")):
            try:
                found.append(_read(record.parent))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("a package cannot be read", path=str(record), error=str(error))
        return found

    def add(self, package: Package, archive: bytes) -> None:
        """Keep a new version, under the next number, which the package is given. STORAGE_FULL."""
        folder = self._folder(package).parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
            try:
                _write_whole(made / _ARCHIVE, archive)
                package.number = self._take_number(folder)
                _write_whole(made / _RECORD, json.dumps(_record(package)).encode())
                os.rename(made, folder / str(package.number))
                _sync(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except OSError as error:
            text = f"the package cannot be kept: {error.strerror}"
            raise ServiceError(Reason.STORAGE_FULL, text) from None

    def keep_result(self, package: Package) -> None:
        """Keep what became of it."""
        result = {
            "state": package.state,
            "error": package.error,
            "warnings": list(package.warnings),
            "facts": asdict(package.facts) if package.facts is not None else None,
        }
        write_json(self._folder(package) / _RESULT, result, mode=0o600)

    def archive(self, package: Package) -> bytes:
        """What was uploaded."""
        return (self._folder(package) / _ARCHIVE).read_bytes()

    def remove(self, package: Package) -> None:
        """Forget a version. Its number is not given again."""
        folder = self._folder(package)
        # Moved first: half a version is none.
        gone = folder.with_name(f".gone-{package.number}")
        os.rename(folder, gone)
        _sync(folder.parent)
        shutil.rmtree(gone, ignore_errors=True)

    def _folder(self, package: Package) -> Path:
        return self._root / project_folder(package.project) / package.name / str(package.number)

    def _take_number(self, folder: Path) -> int:
        counter = folder / _NEXT
        number = int(counter.read_text()) if counter.exists() else 1
        while (folder / str(number)).exists():
            number += 1
        write_atomic(counter, str(number + 1), mode=0o600)
        return number


def _record(package: Package) -> dict[str, Any]:
    return {
        "project": package.project,
        "name": package.name,
        "number": package.number,
        "spec": package.spec.as_json(),
        "sha256": package.sha256,
        "size": package.size,
        "request_id": package.request_id,
        "create_time": package.create_time.isoformat(),
    }


def _read(folder: Path) -> Package:
    value: dict[str, Any] = json.loads((folder / _RECORD).read_text())
    package = Package(
        project=value["project"],
        name=value["name"],
        number=int(value["number"]),
        spec=PackageSpec.from_json(value["spec"]),
        sha256=value["sha256"],
        size=int(value["size"]),
        create_time=datetime.fromisoformat(value["create_time"]).astimezone(UTC),
        request_id=value["request_id"],
    )
    if (folder / _RESULT).exists():
        result: dict[str, Any] = json.loads((folder / _RESULT).read_text())
        package.state = PackageState(result["state"])
        package.error, package.warnings = result["error"], tuple(result["warnings"])
        package.facts = _facts(result["facts"]) if result["facts"] else None
    return package


def _facts(value: Mapping[str, Any]) -> EnvironmentFacts:
    lists = {name: tuple(value[name]) for name in ("splits", "agents", "tools")}
    return EnvironmentFacts(**{**value, **lists})


def _write_whole(path: Path, data: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
