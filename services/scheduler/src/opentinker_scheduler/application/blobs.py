"""Bytes by their hash: signed ways into and out of the object store, for who has no credentials there."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from opentinker_kit.blob_keys import blob_key
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_scheduler.domain.names import SHA256
from opentinker_scheduler.domain.records import Blob
from opentinker_scheduler.ports import Database
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Upload:
    """Where bytes may be put, once; or that they are there."""

    blob: Blob
    exists: bool
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Blobs:
    """Signs uploads and downloads."""

    def __init__(
        self,
        database: Database,
        store: ObjectStore | None,
        clock: Clock,
        *,
        max_bytes: int,
        expires_s: int,
    ) -> None:
        self._database = database
        self._store = store
        self._clock = clock
        self._max_bytes = max_bytes
        self._expires_s = expires_s

    async def create_upload(self, sha256: str, size_bytes: int, project: str) -> Upload:
        """A PUT that only bytes of this hash fit, and only while the project has none."""
        blob = Blob(sha256, size_bytes, f"blob:{sha256}")
        check_blob(blob, "sha256")
        if not 0 < size_bytes <= self._max_bytes:
            text = f"size_bytes is {size_bytes}; it must be from 1 to {self._max_bytes}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="size_bytes")
        store = self._require_store()
        key = blob_key(sha256, project)
        known = await store.head(key)
        if known is not None:
            return Upload(Blob(sha256, known.size_bytes, blob.uri), exists=True)
        signed = await store.presign_put(key, self._expires_s, if_none_match=True, sha256=sha256)
        now = self._clock.now()
        await self._database.run(lambda tx: tx.blobs.put(blob, now))
        return Upload(blob, exists=False, url=signed.url, headers=signed.headers)

    async def download_url(self, blob: Blob, project: str) -> str:
        """A GET of bytes that a project has. BLOB_NOT_FOUND if it has not."""
        check_blob(blob, "blob.sha256")
        store = self._require_store()
        key = blob_key(blob.sha256, project)
        if await store.head(key) is None:
            text = f"there are no bytes with SHA-256 {blob.sha256}"
            raise ServiceError(Reason.BLOB_NOT_FOUND, text, field="blob")
        return await store.presign_get(key, self._expires_s)

    def _require_store(self) -> ObjectStore:
        if self._store is None:
            raise ServiceError(Reason.STORAGE_UNAVAILABLE, "this cluster has no object store (setting s3)")
        return self._store


def check_blob(blob: Blob, field: str) -> None:
    """INVALID_FIELD for what is no hash: keys are built of nothing else."""
    if SHA256.fullmatch(blob.sha256) is None:
        raise ServiceError(Reason.INVALID_FIELD, f"{blob.sha256!r} is no lower-case hex SHA-256", field=field)
