"""Publishing weights: local files, manifest, catalog, event; the upload beside it.

A version exists when its manifest does, and is registered under the holder's attempt. An operation that runs
again finds its manifest and publishes nothing; where the weights differ (the replay diverged) they become the
next version, since a number is never used twice.

Why a version is safe when its operation is DONE though its files may be on this host only: its manifest has
their hashes, and what makes them is in the object store, a recovery checkpoint from before it and the log
from there on, neither of which is cut before the files have arrived. So if the process dies, the next one
runs the operation again, gets the same bits, and uploads them. Servers of this host link the files and check
the hashes; others wait for the objects. If a replay on another machine gives other bits, the version is
uploaded from this host's disk if that is there, and otherwise marked as lost in its manifest, so that nobody
waits for it.
"""

import asyncio
import platform
import shutil
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import EventBus
from opentinker_trainer.application.held import HeldPolicy
from opentinker_trainer.application.patience import patiently
from opentinker_trainer.application.store import PolicyStore, describe_files, version_prefix
from opentinker_trainer.domain.manifest import MANIFEST, Manifest, StoredFile
from opentinker_trainer.domain.tuning import tuning_facts
from opentinker_trainer.ports import Catalog, Engine
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.events.v1 import event_pb2
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

_RETRY_UPLOAD_S = 2.0
_MODELS_ON_THEIR_WAY = 2
"""Of a policy whose versions are whole models, how many may be uploading when the next is published."""
_KEPT_MODELS = 2
"""Of a policy whose versions are whole models, how many stay on this host at most."""


class Publisher:
    """Makes versions of policies."""

    def __init__(
        self,
        store: PolicyStore,
        catalog: Catalog,
        bus: EventBus,
        clock: Clock,
        *,
        publish_dir: Path,
        keep: int,
        keep_models: int,
        upload_first: bool,
        source: str,
    ) -> None:
        """`keep`: versions of a policy on this host. `keep_models`: versions in the object store, where they
        are whole models.
        """
        self._store = store
        self._catalog = catalog
        self._bus = bus
        self._clock = clock
        self._publish_dir = publish_dir.absolute()
        self._keep = keep
        self._keep_models = keep_models
        self._upload_first = upload_first
        self._source = source
        self._uploading: list[Path] = []

    async def publish(
        self, engine: Engine, policy: HeldPolicy, seq: int, number: int
    ) -> tuple[policy_pb2.PolicyVersion, timedelta]:
        """Publish the engine's weights as version `number`, or a later one if that is taken by others."""
        if policy.record.policy.tuning.HasField("full"):
            while len(policy.uploads) >= _MODELS_ON_THEIR_WAY:
                # Whole models would fill the disk faster than they leave it.
                await asyncio.wait(policy.uploads.values(), return_when=asyncio.FIRST_COMPLETED)
        directory, files, engine_time = await self._export(engine, policy, seq)
        others: dict[str, Manifest] = {}
        while True:
            claim = partial(self._claim, policy, directory, files, number, others)
            version = await patiently(self._clock, claim)
            if version is not None:
                break
            log.error("replay diverged", policy=policy.name, version=number)
            number += 1
        for prefix, recorded in others.items():
            # Only now: who could register a version holds the policy, and no other host is at work on it.
            await patiently(self._clock, partial(self._settle, policy, prefix, recorded))
        await self.announce(version)
        self._prune(policy)
        return version, engine_time

    async def publish_first(self, engine: Engine, policy: HeldPolicy) -> policy_pb2.PolicyVersion:
        """Store version 0, files before manifest; registering it is up to the caller.

        Where all weights are trained and they are still the base model's, it has no files of its own.
        """
        prefix = version_prefix(policy.name, 0)
        record = policy.record
        if record.policy.tuning.HasField("full") and not (record.from_checkpoint or record.import_files):
            manifest = Manifest((), {**self._facts(policy, 0, Path()), "kind": "base"})
        else:
            directory, files, _ = await self._export(engine, policy, 0)
            await self._store.upload(prefix, directory, files)
            manifest = Manifest(files, self._facts(policy, 0, directory))
        recorded = await self._store.write_manifest(prefix, manifest)
        return self._version(policy, 0, recorded.sha256)

    async def announce(self, version: policy_pb2.PolicyVersion, again: str = "") -> None:
        """Tell whoever listens. A hint: losing it loses nothing."""
        event = event_pb2.Event(id=f"weights.published/{version.name}{again}", source=self._source)
        event.occur_time.FromDatetime(self._clock.now())
        event.weights_published.CopyFrom(
            event_pb2.WeightsPublished(
                policy=version.policy,
                version=version.version,
                sha256=version.sha256,
                manifest_key=version.manifest_key,
            )
        )
        await self._bus.publish(event, event.id)

    async def _export(
        self, engine: Engine, policy: HeldPolicy, seq: int
    ) -> tuple[Path, tuple[StoredFile, ...], timedelta]:
        """Have the engine write its weights into a folder named by what is in them."""
        folder = self._publish_dir / policy.id
        draft = folder / f".draft-{seq}"
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
        saved = await engine.save(policy.name, draft, adapter_only=True)
        files = await describe_files(draft, saved.files)
        target = folder / Manifest(files, {}).sha256[:24]
        if target.exists():
            await asyncio.to_thread(shutil.rmtree, draft)
        else:
            draft.rename(target)
        return target, files, saved.engine_time

    async def _claim(
        self,
        policy: HeldPolicy,
        directory: Path,
        files: tuple[StoredFile, ...],
        number: int,
        others: dict[str, Manifest],
    ) -> policy_pb2.PolicyVersion | None:
        """Make files version `number`; None if that number belongs to other weights, which `others` then has
        by their prefix.
        """
        prefix = version_prefix(policy.name, number)
        manifest = Manifest(files, self._facts(policy, number, directory))
        if self._upload_first:
            found = await self._store.find_manifest(prefix)
            if found is not None and found.sha256 != manifest.sha256:
                others[prefix] = found
                return None
            await self._store.upload(prefix, directory, files)
        recorded = await self._store.write_manifest(prefix, manifest)
        if recorded.sha256 != manifest.sha256:
            others[prefix] = recorded
            return None
        version = self._version(policy, number, manifest.sha256)
        try:
            whole = policy.record.policy.tuning.HasField("full")
            keep = self._keep_models if whole else 0
            await self._catalog.register_version(version, policy.attempt, keep)
        except ServiceError as error:
            if error.reason is Reason.ALREADY_REGISTERED:
                return None
            raise
        if not self._upload_first:
            self._start_upload(policy, prefix, directory, files)
        return version

    async def _settle(self, policy: HeldPolicy, prefix: str, recorded: Manifest) -> None:
        """See to a version that was recorded and is not made again: upload what is missing of it if this host
        has it still; otherwise nobody shall wait for it.
        """
        if recorded.facts.get("lost") or not await self._store.missing(prefix, recorded.files):
            return
        directory = Path(str(recorded.facts.get("local_path")))
        try:
            files = await describe_files(directory, [file.name for file in recorded.files])
        except OSError:
            files = ()
        if Manifest(files, {}).sha256 == recorded.sha256:
            self._start_upload(policy, prefix, directory, files)
            return
        log.error("a version is lost: its host is gone and the replay gave other weights", version=prefix)
        await self._store.mark_lost(prefix, recorded)

    def _start_upload(
        self, policy: HeldPolicy, prefix: str, directory: Path, files: Iterable[StoredFile]
    ) -> None:
        seq = (policy.applied_seq or 0) + 1
        before = policy.uploads.get(seq)
        task = policy.begin(self._upload(prefix, directory, tuple(files), before))
        policy.uploads[seq] = task

        def ended(_: "asyncio.Task[None]") -> None:
            if policy.uploads.get(seq) is task:
                del policy.uploads[seq]

        task.add_done_callback(ended)

    async def _upload(
        self,
        prefix: str,
        directory: Path,
        files: tuple[StoredFile, ...],
        before: "asyncio.Task[None] | None",
    ) -> None:
        """Upload files, after another upload of the same operation if there is one."""
        self._uploading.append(directory)
        try:
            if before is not None:
                await asyncio.wait([before])
            while True:
                try:
                    await self._store.upload(prefix, directory, await self._store.missing(prefix, files))
                    return
                except ServiceError as error:
                    log.warning("upload of a version waits", prefix=prefix, reason=error.reason)
                    await self._clock.sleep(_RETRY_UPLOAD_S)
        finally:
            self._uploading.remove(directory)

    def _prune(self, policy: HeldPolicy) -> None:
        """Keep the newest few on this host, and what is not uploaded yet."""
        folder = self._publish_dir / policy.id
        keep = self._keep
        if policy.record.policy.tuning.HasField("full"):
            keep = min(keep, _KEPT_MODELS)
        kept = sorted(
            (path for path in folder.iterdir() if not path.name.startswith(".")),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for path in kept[:-keep]:
            if path not in self._uploading:
                shutil.rmtree(path, ignore_errors=True)

    def _facts(self, policy: HeldPolicy, number: int, directory: Path) -> dict[str, Any]:
        record = policy.record.policy
        return {
            "policy": policy.name,
            "version": number,
            "kind": record.tuning.WhichOneof("kind"),
            "base_model": record.base_model,
            "base_digest": record.base_digest,
            **tuning_facts(policy.spec),
            "step": policy.state.step,
            "local_path": str(directory),
            "host_id": platform.node(),
            "created_at": self._clock.now().isoformat(),
        }

    def _version(self, policy: HeldPolicy, number: int, sha256: str) -> policy_pb2.PolicyVersion:
        prefix = version_prefix(policy.name, number)
        return policy_pb2.PolicyVersion(
            name=prefix,
            policy=policy.name,
            version=number,
            sha256=sha256,
            manifest_key=f"{prefix}/{MANIFEST}",
            step=policy.state.step,
        )
