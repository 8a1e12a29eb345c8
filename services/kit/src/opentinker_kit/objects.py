"""The object store as a port, its S3 adapter on the `minio` SDK, and one in memory for unit tests.

Keys are relative paths without a leading slash, built from validated ids only. What is written once and must
not be written twice (manifests) goes through a conditional PUT: `put_if_absent`, or a presigned PUT that
carries `If-None-Match: *`. A stored object appears whole or not at all.

What goes wrong is said with reasons of the catalogue: BLOB_NOT_FOUND (`get` of what is not there),
STORAGE_UNAVAILABLE (no answer), STORAGE_FULL (no room; nothing was changed).
"""

import asyncio
import base64
import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error, ServerError

from opentinker_kit.errors import ServiceError
from opentinker_kit.settings import S3Settings
from opentinkerapi.runtime.reasons import Reason

IF_NONE_MATCH = {"If-None-Match": "*"}
_CHECKSUM = "x-amz-checksum-sha256"
_PART_BYTES = 32 * 1024 * 1024
"""Larger objects travel in parts of this size, each held in memory."""
_MISSING = ("NoSuchKey", "NoSuchObject", "NoSuchVersion")
_FULL = ("XMinioStorageFull", "InsufficientStorage", "EntityTooLarge", "QuotaExceeded")
_FULL_TEXTS = (
    "no space left",
    "not enough space",
    "no free volumes",
    "no more writable volumes",
    "storage full",
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What is known of an object without its bytes."""

    key: str
    size_bytes: int
    etag: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class SignedUrl:
    """A URL that needs no credentials, and the headers that must be sent with it."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


class ObjectStore(Protocol):
    """Immutable bytes under keys."""

    async def put(self, key: str, data: bytes | Path, content_type: str | None = None) -> ObjectInfo:
        """Store bytes or a file, replacing what was there."""
        ...

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        """Store unless the key is taken; whether this call stored. Of many at once exactly one does."""
        ...

    async def get(self, key: str) -> bytes:
        """The bytes of an object. BLOB_NOT_FOUND if there is none."""
        ...

    async def get_to_file(self, key: str, path: Path) -> None:
        """Write an object to a file, which appears whole or not at all. BLOB_NOT_FOUND if there is none."""
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """What is known of an object, or None."""
        ...

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose keys start with `prefix`, in key order."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""
        ...

    async def presign_put(
        self, key: str, expires_s: int, if_none_match: bool = False, sha256: str | None = None
    ) -> SignedUrl:
        """A URL that stores one object. With `sha256` (hex) the store refuses any other bytes."""
        ...

    async def presign_get(self, key: str, expires_s: int) -> str:
        """A URL that reads one object."""
        ...


class S3ObjectStore:
    """Any S3-compatible server. The SDK blocks, so it runs in threads."""

    def __init__(self, settings: S3Settings, *, patience: int = 5) -> None:
        """`patience` is how often a call that gets no answer is tried again: 5 times take about 6 s."""
        self._bucket = settings.bucket
        self._http = urllib3.PoolManager(
            maxsize=16,
            timeout=urllib3.Timeout(connect=2.0, read=60.0),
            # A restarting server is waited for, a missing one is reported.
            retries=urllib3.Retry(
                total=patience,
                backoff_factor=0.2,
                status_forcelist=(500, 502, 503, 504),
                raise_on_status=False,
            ),
        )
        secret = settings.secret_key()
        self._client = self._connect(settings, settings.endpoint, settings.secure, secret)
        public = settings.public_endpoint
        self._public = self._client
        if public:
            scheme, _, host = public.rpartition("://")
            self._public = self._connect(settings, host, scheme == "https", secret)

    def _connect(self, settings: S3Settings, endpoint: str, secure: bool, secret: str) -> Minio:
        return Minio(
            endpoint,
            access_key=settings.access_key,
            secret_key=secret,
            secure=secure,
            region=settings.region,
            http_client=self._http,
        )

    async def ensure_bucket(self) -> None:
        """Make the bucket unless it is there."""

        def ensure() -> None:
            if not self._client.bucket_exists(self._bucket):
                try:
                    self._client.make_bucket(self._bucket)
                except S3Error as error:
                    if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                        raise

        await self._call("bucket", ensure)

    async def put(self, key: str, data: bytes | Path, content_type: str | None = None) -> ObjectInfo:
        kind = content_type or "application/octet-stream"

        def run() -> ObjectInfo:
            size = data.stat().st_size if isinstance(data, Path) else len(data)
            if size <= _PART_BYTES:
                body = data.read_bytes() if isinstance(data, Path) else data
                response = self._checked_put(key, body, {"Content-Type": kind})
                if response.status != 200:
                    raise _http_failure(key, response.status, response.data)
                etag = response.headers.get("ETag")
            else:  # in parts, which appear as one object at the end
                with data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as file:
                    etag = self._client.put_object(
                        self._bucket, key, file, size, content_type=kind, part_size=_PART_BYTES
                    ).etag
            return ObjectInfo(key, size, (etag or "").strip('"'), datetime.now(UTC))

        return await self._call(key, run)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        def run() -> bool:
            body = data.read_bytes() if isinstance(data, Path) else data
            response = self._checked_put(key, body, IF_NONE_MATCH)
            if response.status == 200:
                return True
            if response.status == 412:
                return False
            raise _http_failure(key, response.status, response.data)

        return await self._call(key, run)

    def _checked_put(self, key: str, body: bytes, headers: Mapping[str, str]) -> urllib3.BaseHTTPResponse:
        """One PUT whose SHA-256 is part of what is signed.

        Without it a writer that dies after the headers leaves an empty object on some servers.
        """
        url = self._client.get_presigned_url(
            "PUT",
            self._bucket,
            key,
            expires=timedelta(minutes=5),
            extra_query_params=_checksum(hashlib.sha256(body).digest()),
        )
        return self._http.request("PUT", url, body=body, headers=dict(headers))

    async def get(self, key: str) -> bytes:
        def run() -> bytes:
            response = self._client.get_object(self._bucket, key)
            try:
                return response.read()
            finally:
                response.close()
                response.release_conn()

        return await self._call(key, run)

    async def get_to_file(self, key: str, path: Path) -> None:
        await self._call(key, lambda: self._client.fget_object(self._bucket, key, str(path)))

    async def head(self, key: str) -> ObjectInfo | None:
        def run() -> ObjectInfo | None:
            try:
                found = self._client.stat_object(self._bucket, key)
            except S3Error as error:
                if error.code in _MISSING:
                    return None
                raise
            return ObjectInfo(
                key, found.size or 0, (found.etag or "").strip('"'), found.last_modified or datetime.now(UTC)
            )

        return await self._call(key, run)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        def run() -> list[ObjectInfo]:
            found = self._client.list_objects(self._bucket, prefix=prefix, recursive=True)
            infos = [
                ObjectInfo(
                    item.object_name or "",
                    item.size or 0,
                    (item.etag or "").strip('"'),
                    item.last_modified or datetime.now(UTC),
                )
                for item in found
                if not item.is_dir
            ]
            return sorted(infos, key=lambda info: info.key)

        return await self._call(prefix, run)

    async def delete(self, key: str) -> None:
        await self._call(key, lambda: self._client.remove_object(self._bucket, key))

    async def presign_put(
        self, key: str, expires_s: int, if_none_match: bool = False, sha256: str | None = None
    ) -> SignedUrl:
        # As a signed query parameter the checksum cannot be left out by who holds the URL.
        checksum = _checksum(bytes.fromhex(sha256)) if sha256 is not None else {}
        url = self._public.get_presigned_url(
            "PUT", self._bucket, key, expires=timedelta(seconds=expires_s), extra_query_params=checksum
        )
        return SignedUrl(url, IF_NONE_MATCH if if_none_match else {})

    async def presign_get(self, key: str, expires_s: int) -> str:
        return self._public.get_presigned_url("GET", self._bucket, key, expires=timedelta(seconds=expires_s))

    async def _call(self, key: str, run: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(run)
        except S3Error as error:
            if error.code in _MISSING:
                raise ServiceError(Reason.BLOB_NOT_FOUND, f"there is no object {key}") from None
            if _is_full(error.code or "", error.message or ""):
                raise _full(key) from error
            raise ServiceError(
                Reason.STORAGE_UNAVAILABLE,
                f"the object store refused {key}: {error.code}{_hint(error.code or '')}",
                metadata={"s3_code": error.code},
            ) from error
        except ServerError as error:
            raise _http_failure(key, error.status_code, str(error).encode()) from error
        except (urllib3.exceptions.HTTPError, MinioException) as error:
            raise ServiceError(
                Reason.STORAGE_UNAVAILABLE, f"the object store did not answer ({key})", retry_after_s=1.0
            ) from error


def _checksum(digest: bytes) -> dict[str, str | list[str] | tuple[str]]:
    """The query parameter by which a store refuses bodies with another SHA-256."""
    return {_CHECKSUM: base64.b64encode(digest).decode()}


def _is_full(code: str, text: str) -> bool:
    return code in _FULL or any(known in text.lower() for known in _FULL_TEXTS)


def _hint(code: str) -> str:
    """What to look at: some servers say no more than this when their disk is full."""
    return "; its disk may be full, see its log" if code in ("InternalError", "500") else ""


def _full(key: str) -> ServiceError:
    return ServiceError(
        Reason.STORAGE_FULL, f"no room left in the object store for {key}; free some and try again"
    )


def _http_failure(key: str, status: int, body: bytes) -> ServiceError:
    if status == 507 or _is_full("", body[:2000].decode(errors="replace")):
        return _full(key)
    return ServiceError(
        Reason.STORAGE_UNAVAILABLE,
        f"the object store answered HTTP {status} for {key}{_hint(str(status))}",
        retry_after_s=1.0,
        metadata={"http_status": status},
    )


class MemoryObjectStore:
    """Objects in a dict, for unit tests; passes the same contract tests as S3, URLs apart."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, datetime]] = {}

    async def put(self, key: str, data: bytes | Path, content_type: str | None = None) -> ObjectInfo:
        self._objects[key] = (_bytes(data), datetime.now(UTC))
        return self._info(key)

    async def put_if_absent(self, key: str, data: bytes | Path) -> bool:
        if key in self._objects:
            return False
        await self.put(key, data)
        return True

    async def get(self, key: str) -> bytes:
        if key not in self._objects:
            raise ServiceError(Reason.BLOB_NOT_FOUND, f"there is no object {key}")
        return self._objects[key][0]

    async def get_to_file(self, key: str, path: Path) -> None:
        data = await self.get(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    async def head(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self._objects else None

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return [self._info(key) for key in sorted(self._objects) if key.startswith(prefix)]

    async def delete(self, key: str) -> None:
        self._objects.pop(key, None)

    async def presign_put(
        self, key: str, expires_s: int, if_none_match: bool = False, sha256: str | None = None
    ) -> SignedUrl:
        return SignedUrl(f"memory:{key}", IF_NONE_MATCH if if_none_match else {})

    async def presign_get(self, key: str, expires_s: int) -> str:
        return f"memory:{key}"

    def _info(self, key: str) -> ObjectInfo:
        data, modified = self._objects[key]
        return ObjectInfo(key, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest(), modified)


def _bytes(data: bytes | Path) -> bytes:
    return data.read_bytes() if isinstance(data, Path) else data
