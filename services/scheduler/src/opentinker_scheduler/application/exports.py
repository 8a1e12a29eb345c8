"""Weights as files that other libraries load: the signed ways to what a version or checkpoint holds."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_scheduler.application.catalog import Catalog
from opentinker_scheduler.domain.names import SHA256, split
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

_ADAPTER = re.compile(r"adapter_(model\.safetensors|config\.json)")
_MODEL = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
    r"|tokenizer(_config\.json|\.json|\.model)|(special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|((video_)?pre)?processor_config\.json|chat_template\.jinja"
)
"""What of a policy's files is weights; optimizer, gradient and counters of a checkpoint are not."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """One file and where to get it."""

    name: str
    sha256: str
    size_bytes: int
    url: str


@dataclass(frozen=True, slots=True)
class Export:
    """`kind` is "lora" (a PEFT directory) or "full" (a Hugging Face directory)."""

    kind: str
    files: tuple[ExportedFile, ...]


class Exports:
    """Signs downloads of weights."""

    def __init__(
        self, database: Database, catalog: Catalog, store: ObjectStore | None, *, expires_s: int
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._store = store
        self._expires_s = expires_s

    async def export(self, name: str, scope: str | None) -> Export:
        """The weights of a version or checkpoint. VERSION_NOT_FOUND, CHECKPOINT_NOT_FOUND, INVALID_STATE for
        a version that is the base model itself, DIGEST_MISMATCH, STORAGE_UNAVAILABLE.
        """
        if self._store is None:
            raise ServiceError(Reason.STORAGE_UNAVAILABLE, "this cluster has no object store (setting s3)")
        sha256, key = await self._database.run(lambda tx: self._recorded(tx, name, scope))
        manifest = await self._manifest(name, sha256, key)
        files = [file for file in manifest["files"] if _ADAPTER.fullmatch(file["name"])]
        kind = "lora"
        if not files:
            files, kind = [file for file in manifest["files"] if _MODEL.fullmatch(file["name"])], "full"
        if not files:
            text = f"{name} is the base model itself: there are no weights of its own to export"
            raise ServiceError(Reason.INVALID_STATE, text, field="name")
        prefix = key.rpartition("/")[0]
        return Export(kind, tuple([await self._signed(prefix, file) for file in files]))

    def _recorded(self, tx: Transaction, name: str, scope: str | None) -> tuple[str, str]:
        if split(name, "policies", "checkpoints") is not None:
            checkpoint = self._catalog.checkpoint(tx, name, scope)
            return checkpoint.sha256, checkpoint.manifest_key
        version = self._catalog.version(tx, name, scope)
        return version.sha256, version.manifest_key

    async def _manifest(self, name: str, sha256: str, key: str) -> Mapping[str, Any]:
        assert self._store is not None
        try:
            manifest = dict(json.loads(await self._store.get(key)))
            lines = sorted(f"{file['name']} {file['sha256']}\n" for file in manifest["files"])
            sizes = [int(file["size_bytes"]) for file in manifest["files"]]
            valid = (
                all(SHA256.fullmatch(file["sha256"]) for file in manifest["files"])
                and min(sizes, default=0) >= 0
            )
        except ServiceError as error:
            if error.reason is not Reason.BLOB_NOT_FOUND:
                raise
            raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {name} is gone") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {name} cannot be read") from error
        if not valid or hashlib.sha256("".join(lines).encode()).hexdigest() != sha256:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {name} is not what was recorded")
        return manifest

    async def _signed(self, prefix: str, file: Mapping[str, Any]) -> ExportedFile:
        assert self._store is not None
        key = f"{prefix}/{file['name']}"
        if await self._store.head(key) is None:
            text = f"{key} is not in the object store yet; the trainer is still uploading it"
            raise ServiceError(Reason.STORAGE_UNAVAILABLE, text, retry_after_s=1.0)
        url = await self._store.presign_get(key, self._expires_s)
        return ExportedFile(file["name"], file["sha256"], int(file["size_bytes"]), url)
