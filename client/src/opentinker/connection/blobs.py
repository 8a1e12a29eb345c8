"""Bytes too large for a message: presigned uploads and downloads, so that the client holds no storage
credentials.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, ControlPlane
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.run.v1 import blob_service_pb2
from opentinkerapi.run.v1.blob_service_pb2_grpc import BlobServiceStub

INLINE_MAX_BYTES = 2 * 1024 * 1024
"""What travels in a message; more is uploaded."""

TRIES = 8
TIMEOUT_S = 60.0


class Blobs:
    """The object store as clients see it."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def upload(self, data: bytes) -> blob_pb2.BlobRef:
        """Store bytes under their hash; bytes that are there already are not sent again."""
        return await self._upload(data, hashlib.sha256(data).hexdigest(), len(data))

    async def upload_file(self, path: Path) -> blob_pb2.BlobRef:
        """The same for a file, which is never in memory as a whole."""
        sha256, size = await asyncio.to_thread(_hash_file, path)
        return await self._upload(path, sha256, size)

    async def _upload(self, data: bytes | Path, sha256: str, size: int) -> blob_pb2.BlobRef:
        request = blob_service_pb2.CreateUploadRequest(sha256=sha256, size_bytes=size)
        for _ in range(TRIES):
            # Signed anew for each try: a signature that is old or for a store that moved would fail for ever.
            upload = await self._control.call(lambda channel: BlobServiceStub(channel).CreateUpload(request))
            if upload.exists:
                return upload.blob
            status = await asyncio.to_thread(_put, upload.url, dict(upload.headers), data)
            # 412: somebody stored the same bytes meanwhile.
            if status in (200, 201, 204, 412):
                return upload.blob
            if status == 507:
                raise errors.StorageFull(
                    "the object store is full; nothing was changed", reason=errors.Reason.STORAGE_FULL
                )
            await asyncio.sleep(PAUSE_S)
        raise errors.Unavailable(
            f"the object store did not take an upload of {size} bytes",
            reason=errors.Reason.STORAGE_UNAVAILABLE,
        )

    async def download(self, blob: blob_pb2.BlobRef) -> bytes:
        """Fetch bytes and check their hash. DataLoss if they are others."""
        request = blob_service_pb2.GetDownloadRequest(blob=blob)
        for _ in range(TRIES):
            signed = await self._control.call(lambda channel: BlobServiceStub(channel).GetDownload(request))
            data = await asyncio.to_thread(_get, signed.url)
            if data is not None:
                if hashlib.sha256(data).hexdigest() != blob.sha256:
                    raise errors.DataLoss(
                        f"blob {blob.sha256} has other bytes than its hash says",
                        reason=errors.Reason.DIGEST_MISMATCH,
                    )
                return data
            await asyncio.sleep(PAUSE_S)
        raise errors.Unavailable(
            f"the object store did not give blob {blob.sha256}", reason=errors.Reason.STORAGE_UNAVAILABLE
        )

    async def fetch_file(self, sign: Callable[[], Awaitable[str]], path: Path, sha256: str) -> None:
        """Write what a signed address gives into a file. DataLoss if its hash is another.

        `sign` gives the address, for each try anew.
        """
        for _ in range(TRIES):
            found = await asyncio.to_thread(_get_file, await sign(), path)
            if found is not None:
                if found != sha256:
                    raise errors.DataLoss(
                        f"{path.name} has other bytes than its hash says",
                        reason=errors.Reason.DIGEST_MISMATCH,
                    )
                return
            await asyncio.sleep(PAUSE_S)
        raise errors.Unavailable(
            f"the object store did not give {path.name}", reason=errors.Reason.STORAGE_UNAVAILABLE
        )


def _hash_file(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size


def _put(url: str, headers: Mapping[str, str], data: bytes | Path) -> int:
    """The HTTP status of a PUT; 0 where there was none."""
    if isinstance(data, Path):
        with data.open("rb") as file:
            # Without a length urllib would send the file in chunks, which S3 does not take.
            return _put_body(url, {**headers, "Content-Length": str(data.stat().st_size)}, file)
    return _put_body(url, headers, data)


def _put_body(url: str, headers: Mapping[str, str], data: bytes | BinaryIO) -> int:
    # Here, and not above: HTTP is a tenth of what importing this package costs, and few need it.
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, data=data, method="PUT", headers=dict(headers))
    # urllib would add a form type that is not what was signed.
    request.add_unredirected_header("Content-Type", headers.get("Content-Type", "application/octet-stream"))
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _get_file(url: str, path: Path) -> str | None:
    """Download into a file; the hash of what came, None if it broke off."""
    import urllib.request

    try:
        response = urllib.request.urlopen(url, timeout=TIMEOUT_S)
    except OSError:
        return None
    digest = hashlib.sha256()
    with response, path.open("wb") as file:
        while True:
            try:
                block: bytes = response.read(1 << 20)
            except OSError:
                return None
            if not block:
                return digest.hexdigest()
            digest.update(block)
            file.write(block)


def _get(url: str) -> bytes | None:
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
            return content
    except OSError:
        return None
