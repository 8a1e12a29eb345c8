"""What a policy has in the object store.

    policies/{policy}/record                      how it was made, written once
    policies/{policy}/ops/{seq}                   the operation log
    policies/{policy}/running, poisoned/{seq}     what was in the engine, what crashed it twice
    policies/{policy}/recovery/{seq}/…            recovery checkpoints
    policies/{policy}/checkpoints/{checkpoint}/…  checkpoints
    policies/{policy}/versions/{n}/…              published weights

A set of files exists once its manifest does; the manifest is created once, by a conditional write, last.
"""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker_kit.blob_keys import blob_key
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_trainer.domain.manifest import MANIFEST, Manifest, StoredFile
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.engine.v1 import trainer_engine_pb2 as pb
from opentinkerapi.runtime.reasons import Reason

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Running:
    """The mark of an operation that is in the engine for longer than a moment."""

    seq: int
    crashes: int
    """How often it was found running when a process had died."""


class PolicyStore:
    """Reads and writes under a policy's name."""

    def __init__(self, objects: ObjectStore) -> None:
        self.objects = objects

    async def write_record(self, record: pb.PolicyRecord) -> bool:
        """Write how a policy was made; False if there is a record already."""
        return await self.objects.put_if_absent(
            f"{record.policy.name}/record", record.SerializeToString(deterministic=True)
        )

    async def read_record(self, policy: str) -> pb.PolicyRecord | None:
        """How a policy was made."""
        data = await self._get(f"{policy}/record")
        return None if data is None else pb.PolicyRecord.FromString(data)

    async def log(self, policy: str, operation: pb.LoggedOperation) -> None:
        """Write a whole operation; when this returns it cannot be lost."""
        await self.objects.put(_op_key(policy, operation.seq), operation.SerializeToString())

    async def read_operation(self, policy: str, seq: int) -> pb.LoggedOperation:
        """One logged operation. BLOB_NOT_FOUND if it is not there."""
        return pb.LoggedOperation.FromString(await self.objects.get(_op_key(policy, seq)))

    async def read_log(self, policy: str) -> list[pb.LoggedOperation]:
        """Every logged operation, in seq order."""
        keys = [info.key for info in await self.objects.list(f"{policy}/ops/")]
        bodies = await asyncio.gather(*(self.objects.get(key) for key in keys))
        operations = [pb.LoggedOperation.FromString(body) for body in bodies]
        return sorted(operations, key=lambda operation: operation.seq)

    async def forget_operations(self, policy: str, seqs: Iterable[int]) -> None:
        """Remove operations from the log."""
        await asyncio.gather(*(self.objects.delete(_op_key(policy, seq)) for seq in seqs))

    async def mark_running(self, policy: str, running: Running) -> None:
        """Note that an operation is in the engine."""
        value = {"seq": running.seq, "crashes": running.crashes}
        await self.objects.put(f"{policy}/running", json.dumps(value).encode())

    async def clear_running(self, policy: str) -> None:
        """The operation is out of the engine."""
        await self.objects.delete(f"{policy}/running")

    async def read_running(self, policy: str) -> Running | None:
        """What was in the engine when an earlier process died."""
        data = await self._get(f"{policy}/running")
        if data is None:
            return None
        value = json.loads(data)
        return Running(int(value["seq"]), int(value["crashes"]))

    async def poison(self, policy: str, seq: int) -> None:
        """Have an operation skipped, for good."""
        await self.objects.put(f"{policy}/poisoned/{seq:012d}", b"")

    async def read_poisoned(self, policy: str) -> set[int]:
        """Operations that are skipped."""
        return {int(info.key.rpartition("/")[2]) for info in await self.objects.list(f"{policy}/poisoned/")}

    async def find_manifest(self, prefix: str) -> Manifest | None:
        """The manifest under a prefix; None means that nothing exists there, whatever lies there."""
        data = await self._get(f"{prefix}/{MANIFEST}")
        return None if data is None else Manifest.from_json(data)

    async def write_manifest(self, prefix: str, manifest: Manifest) -> Manifest:
        """Create the manifest, or return the one that was there first."""
        while True:
            if await self.objects.put_if_absent(f"{prefix}/{MANIFEST}", manifest.to_json()):
                return manifest
            found = await self.find_manifest(prefix)
            if found is not None:
                return found

    async def mark_lost(self, prefix: str, manifest: Manifest) -> None:
        """Note in a manifest that its files will not come any more; the number stays taken."""
        lost = Manifest(manifest.files, {**manifest.facts, "lost": True})
        await self.objects.put(f"{prefix}/{MANIFEST}", lost.to_json())

    async def upload(self, prefix: str, directory: Path, files: Iterable[StoredFile]) -> None:
        """Store files under a prefix."""
        await asyncio.gather(
            *(self.objects.put(f"{prefix}/{file.name}", directory / file.name) for file in files)
        )

    async def missing(self, prefix: str, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Files that are not stored, or not with their size."""
        wanted = list(files)
        infos = await asyncio.gather(*(self.objects.head(f"{prefix}/{file.name}") for file in wanted))
        return [
            file
            for file, info in zip(wanted, infos, strict=True)
            if info is None or info.size_bytes != file.size_bytes
        ]

    async def save_set(
        self, prefix: str, directory: Path, names: Iterable[str], facts: Mapping[str, Any]
    ) -> Manifest | None:
        """Store a directory's files and then their manifest; None if other files have the prefix already."""
        manifest = Manifest(await describe_files(directory, names), facts)
        found = await self.find_manifest(prefix)
        if found is None:
            await self.upload(prefix, directory, manifest.files)
            found = await self.write_manifest(prefix, manifest)
        return found if found.sha256 == manifest.sha256 else None

    async def fetch_set(self, prefix: str, directory: Path) -> Manifest | None:
        """Load a set into a directory, replacing what is there; None if there is no such set.

        DIGEST_MISMATCH if an object is missing or not what was recorded.
        """
        manifest = await self.find_manifest(prefix)
        if manifest is None:
            return None
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in manifest.files:
            try:
                await self.objects.get_to_file(f"{prefix}/{file.name}", directory / file.name)
            except ServiceError as error:
                if error.reason is not Reason.BLOB_NOT_FOUND:
                    raise
                text = f"{prefix}/{file.name} is recorded and not there"
                raise ServiceError(Reason.DIGEST_MISMATCH, text) from error
        described = await describe_files(directory, [file.name for file in manifest.files])
        other = sorted(file.name for file in set(described) ^ set(manifest.files))
        if other:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"{prefix}/{other[0]} is not what was recorded")
        return manifest

    async def recovery_seqs(self, policy: str) -> list[int]:
        """Recovery checkpoints that are complete, newest first."""
        infos = await self.objects.list(f"{policy}/recovery/")
        complete = [info.key for info in infos if info.key.endswith(f"/{MANIFEST}")]
        return sorted((int(key.split("/")[-2]) for key in complete), reverse=True)

    async def delete_set(self, prefix: str) -> None:
        """Remove a set, its manifest first."""
        await self.objects.delete(f"{prefix}/{MANIFEST}")
        for info in await self.objects.list(f"{prefix}/"):
            await self.objects.delete(info.key)

    async def read_blob(self, blob: blob_pb2.BlobRef, project: str) -> bytes:
        """Bytes that a project uploaded. BLOB_NOT_FOUND, or DIGEST_MISMATCH if their name says otherwise."""
        _check_digest(blob)
        data = await self.objects.get(blob_key(blob.sha256, project))
        if hashlib.sha256(data).hexdigest() != blob.sha256:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"blob {blob.sha256} holds other bytes")
        return data

    async def fetch_blob(self, blob: blob_pb2.BlobRef, path: Path, project: str, *, what: str) -> None:
        """Write bytes that a project uploaded to a file. BLOB_NOT_FOUND, or DIGEST_MISMATCH naming `what`
        they are.
        """
        _check_digest(blob)
        await self.objects.get_to_file(blob_key(blob.sha256, project), path)
        (found,) = await describe_files(path.parent, [path.name])
        if found.sha256 != blob.sha256:
            text = f"{what}: blob {blob.sha256} holds other bytes"
            raise ServiceError(Reason.DIGEST_MISMATCH, text, field=f"import_files[{what}]")

    async def write_blob(self, data: bytes, project: str) -> blob_pb2.BlobRef:
        """Store bytes under their hash, for a project."""
        sha256 = hashlib.sha256(data).hexdigest()
        await self.objects.put_if_absent(blob_key(sha256, project), data)
        return blob_pb2.BlobRef(sha256=sha256, size_bytes=len(data), uri=f"blob:{sha256}")

    async def _get(self, key: str) -> bytes | None:
        try:
            return await self.objects.get(key)
        except ServiceError as error:
            if error.reason is Reason.BLOB_NOT_FOUND:
                return None
            raise


async def describe_files(directory: Path, names: Iterable[str]) -> tuple[StoredFile, ...]:
    """Names, hashes and sizes of files, in name order."""
    ordered = sorted(names)
    return tuple(await asyncio.gather(*(asyncio.to_thread(_describe, directory / name) for name in ordered)))


def recovery_prefix(policy: str, seq: int) -> str:
    return f"{policy}/recovery/{seq:012d}"


def version_prefix(policy: str, version: int) -> str:
    return f"{policy}/versions/{version}"


def _check_digest(blob: blob_pb2.BlobRef) -> None:
    if len(blob.sha256) != 64 or not set(blob.sha256) <= set("0123456789abcdef"):
        raise ServiceError(Reason.INVALID_FIELD, "sha256 is no lower-case hex SHA-256", field="blob.sha256")


def _op_key(policy: str, seq: int) -> str:
    return f"{policy}/ops/{seq:012d}"


def _describe(path: Path) -> StoredFile:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return StoredFile(path.name, digest.hexdigest(), size)
