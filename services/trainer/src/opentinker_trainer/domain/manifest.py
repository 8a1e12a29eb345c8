"""Manifests: what makes a set of objects a version or a checkpoint. Written once, last."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One object beside the manifest."""

    name: str
    sha256: str
    size_bytes: int


def digest_of(files: Iterable[StoredFile]) -> str:
    """SHA-256 over the lines `{name} {sha256}`, in name order: the same files, the same digest."""
    lines = sorted(f"{file.name} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files and what they are; `facts` holds everything else that is recorded."""

    files: tuple[StoredFile, ...]
    facts: Mapping[str, Any]

    @property
    def sha256(self) -> str:
        return digest_of(self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        files = [
            {"name": file.name, "sha256": file.sha256, "size_bytes": file.size_bytes}
            for file in sorted(self.files, key=lambda file: file.name)
        ]
        value = {**self.facts, "files": files, "sha256": self.sha256}
        return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Manifest":
        """ServiceError DIGEST_MISMATCH if it cannot be read or contradicts itself."""
        try:
            value = dict(json.loads(data))
            files = tuple(
                StoredFile(str(file["name"]), str(file["sha256"]), int(file["size_bytes"]))
                for file in value.pop("files")
            )
            recorded = value.pop("sha256")
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceError(Reason.DIGEST_MISMATCH, "a manifest cannot be read") from error
        if digest_of(files) != recorded:
            raise ServiceError(Reason.DIGEST_MISMATCH, "a manifest's digest is not that of its files")
        if any("/" in file.name or file.name.startswith(".") for file in files):
            raise ServiceError(Reason.DIGEST_MISMATCH, "a manifest names a file outside its folder")
        return cls(files, value)
