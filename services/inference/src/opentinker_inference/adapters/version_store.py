"""Brings versions and checkpoints to this host: manifest and files from the object store, or a local path.

A version's directory here is made once: files are linked or copied from `local_path` where that exists and
matches, otherwise downloaded; every file's sha256 is checked, then the weights are validated, then the
directory gets its name. So what has a name is whole.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from opentinker_inference.domain.adapter_layout import Shapes, check_adapter, linear_layers
from opentinker_inference.domain.model_layout import check_model, is_tied, output_shape
from opentinker_inference.domain.versions import LocalWeights, ModelRef
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import ObjectStore
from opentinker_kit.safetensors_header import check_finite, checkpoint_shapes, read_shapes
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
MODEL_CONFIG = "config.json"
UPLOAD_PATIENCE_S = 60.0
"""A manifest may be registered while its files are still being uploaded: how long they are waited for."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_WEIGHTS = re.compile(
    r"adapter_(model\.safetensors|config\.json)"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
"""What of a checkpoint's files engines read."""
_KEPT = 16
_KEPT_MODELS = 3
"""Of the kept versions, how many may be whole models: one that is loading, and two that come meanwhile."""


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    sha256: str
    size_bytes: int


class ObjectVersionStore:
    """VersionStore over an object store; without one, no version is found."""

    def __init__(
        self,
        objects: ObjectStore | None,
        cache_dir: Path,
        *,
        model_dir: Path,
        base_digest: str,
        max_rank: int,
        validate: bool = True,
        serving_mode: str = "",
        adapts_output: bool = False,
        upload_patience_s: float = UPLOAD_PATIENCE_S,
    ) -> None:
        """`validate=False` is for engines without a model, which take anything. `adapts_output`: the engine
        can adapt the output layer in this serving mode.
        """
        self._objects = objects
        self._cache_dir = cache_dir / str(os.getpid())
        self._model_dir = model_dir
        self._base_digest = base_digest
        self._max_rank = max_rank
        self._validate = validate
        self._upload_patience_s = upload_patience_s
        self._serving_mode = serving_mode
        self._adapts_output = adapts_output
        self._base: tuple[Mapping[str, Any], Shapes] | None = None
        self._fetched: OrderedDict[str, LocalWeights | None] = OrderedDict()
        self._running: dict[str, asyncio.Task[LocalWeights | None]] = {}
        self._held: Counter[str] = Counter()
        """Versions that an engine is reading, or is about to."""
        self._policies: set[str] = set()

    def clean_up(self) -> None:
        """Remove what this process brought here, and what servers left that are gone."""
        if not self._cache_dir.parent.is_dir():
            return
        for left in self._cache_dir.parent.iterdir():
            if left.name == str(os.getpid()) or not Path(f"/proc/{left.name}").exists():
                shutil.rmtree(left, ignore_errors=True)

    def knows(self, policy: str) -> bool:
        return policy in self._policies

    async def fetch(self, ref: ModelRef) -> LocalWeights | None:
        if ref.is_base:
            return None
        if ref.key in self._fetched:
            self._fetched.move_to_end(ref.key)
            return self._fetched[ref.key]
        task = self._running.get(ref.key)
        if task is None:
            task = asyncio.create_task(self._fetch(ref))
            self._running[ref.key] = task
            task.add_done_callback(lambda _: self._running.pop(ref.key, None))
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def hold(self, ref: ModelRef) -> AsyncIterator[LocalWeights | None]:
        self._held[ref.key] += 1
        try:
            yield await self.fetch(ref)
        finally:
            self._held[ref.key] -= 1
            self._held += Counter()  # forgets those at 0

    async def _fetch(self, ref: ModelRef) -> LocalWeights | None:
        started = time.monotonic()
        manifest = await self._manifest(ref)
        kind = _served_kind(manifest)
        weights: LocalWeights | None = None
        if kind in ("lora", "full"):
            weights = LocalWeights(await self._bring(ref, manifest, full=kind == "full"), kind == "full")
        elif kind != "base":
            raise ServiceError(
                Reason.UNSUPPORTED_OPTION,
                f"{ref} is a version of kind {kind!r}; this server serves lora, full and base",
            )
        self._policies.add(ref.policy)
        self._fetched[ref.key] = weights
        await self._trim()
        log.info("version fetched", version=ref.key, seconds=round(time.monotonic() - started, 3))
        return weights

    async def _manifest(self, ref: ModelRef) -> Mapping[str, Any]:
        if self._objects is None:
            text = f"{ref} cannot be loaded: this server was started without an object store"
            raise ServiceError(Reason.VERSION_NOT_FOUND, text, field="model.policy_version")
        key = f"{ref.key}/manifest.json"
        try:
            data = await self._objects.get(key)
        except ServiceError as error:
            if error.reason is not Reason.BLOB_NOT_FOUND:
                raise
            if ref.checkpoint:
                raise ServiceError(
                    Reason.CHECKPOINT_NOT_FOUND, f"{ref} does not exist", field="model.checkpoint"
                ) from None
            text = f"{ref} does not exist: nothing was published under it"
            raise ServiceError(Reason.VERSION_NOT_FOUND, text, field="model.policy_version") from None
        try:
            manifest: Mapping[str, Any] = dict(json.loads(data))
        except (ValueError, TypeError) as error:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {ref} cannot be read") from error
        if manifest.get("lost"):
            text = f"{ref} was lost with the host that made it, before its files were uploaded"
            raise ServiceError(Reason.VERSION_NOT_FOUND, text, field="model.policy_version")
        base = manifest.get("base_digest")
        if self._validate and base and base != self._base_digest:
            raise ServiceError(
                Reason.INVALID_WEIGHTS,
                f"{ref} was trained on another base model ({manifest.get('base_model')!r}, digest "
                f"{str(base)[:12]}) than this server serves ({self._base_digest[:12]})",
            )
        return manifest

    async def _bring(self, ref: ModelRef, manifest: Mapping[str, Any], *, full: bool) -> Path:
        files = _files(ref, manifest)
        work = self._cache_dir / f"incoming-{uuid.uuid4().hex}"
        target = self._cache_dir / ref.key
        local = manifest.get("local_path")
        try:
            work.mkdir(parents=True)
            if not (local and await asyncio.to_thread(_take_local, Path(local), work, files)):
                await self._download(ref, files, work)
            if self._validate:
                await asyncio.to_thread(self._check_model if full else self._check_adapter, work)
            await asyncio.to_thread(_rename, work, target)
        except OSError as error:
            text = f"{ref} cannot be stored on this host: {error.strerror}"
            raise ServiceError(Reason.STORAGE_FULL, text) from error
        finally:
            await asyncio.to_thread(shutil.rmtree, work, True)
        return target

    async def _download(self, ref: ModelRef, files: list[_File], work: Path) -> None:
        assert self._objects is not None
        give_up = time.monotonic() + self._upload_patience_s
        for file in files:
            while True:
                try:
                    await self._objects.get_to_file(f"{ref.key}/{file.name}", work / file.name)
                    break
                except ServiceError as error:
                    if error.reason is not Reason.BLOB_NOT_FOUND:
                        raise
                    if time.monotonic() > give_up:
                        text = f"{ref} is registered, but its file {file.name} is not in the object store"
                        raise ServiceError(Reason.STORAGE_UNAVAILABLE, text, retry_after_s=5.0) from None
                await asyncio.sleep(0.2)
            if await asyncio.to_thread(_sha256, work / file.name) != file.sha256:
                text = f"{file.name} of {ref} does not match the hash in its manifest"
                raise ServiceError(Reason.DIGEST_MISMATCH, text)

    def _check_adapter(self, directory: Path) -> None:
        config = _read_config(directory / CONFIG)
        base_config, base_tensors = self._base_model()
        layers = linear_layers(base_tensors)
        tensors = read_shapes(directory / TENSORS)
        if any(".lm_head." in name for name in tensors):
            layers["lm_head"] = self._output_layer(base_config, base_tensors)
        check_adapter(config, tensors, layers, self._max_rank)
        check_finite(directory / TENSORS, ("F32",))

    def _output_layer(self, config: Mapping[str, Any], tensors: Shapes) -> tuple[int, int]:
        """(out, in) of the output layer. UNSUPPORTED_COMBINATION where this server cannot adapt it."""
        shape = output_shape(config, tensors)
        if not self._adapts_output or shape is None:
            way_out = "use serving_mode=merged, or engine=transformers"
        elif self._serving_mode == "merged" and is_tied(config, tensors):
            way_out = (
                "merged it would change the embedding too; use engine=transformers, serving_mode=adapter"
            )
        else:
            return shape
        text = f"the adapter changes lm_head, which this server cannot adapt: {way_out}"
        raise ServiceError(Reason.UNSUPPORTED_COMBINATION, text)

    def _check_model(self, directory: Path) -> None:
        config = _read_config(directory / MODEL_CONFIG)
        check_model(config, checkpoint_shapes(directory), *self._base_model())
        for path in sorted(directory.glob("*.safetensors")):
            check_finite(path, ("F32", "BF16", "F16"))

    def _base_model(self) -> tuple[Mapping[str, Any], Shapes]:
        if self._base is None:
            self._base = _read_config(self._model_dir / MODEL_CONFIG), checkpoint_shapes(self._model_dir)
        return self._base

    async def _trim(self) -> None:
        models = [key for key, weights in self._fetched.items() if weights is not None and weights.full]
        old = models[:-_KEPT_MODELS] + list(self._fetched)[:-_KEPT]
        for key in old:
            if self._held[key]:
                continue
            weights = self._fetched.pop(key, None)
            if weights is not None:
                await asyncio.to_thread(shutil.rmtree, weights.directory, True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ServiceError(Reason.INVALID_WEIGHTS, f"{path.name} is missing or cannot be read") from error


def _served_kind(manifest: Mapping[str, Any]) -> str:
    """What of a set of files is served: "lora", "full" or "base"; other kinds are refused. A checkpoint is
    served by its weights, whichever it holds.
    """
    kind = str(manifest.get("kind", "lora"))
    if kind != "checkpoint":
        return kind
    return "lora" if any(file.get("name") == TENSORS for file in manifest.get("files", [])) else "full"


def _files(ref: ModelRef, manifest: Mapping[str, Any]) -> list[_File]:
    try:
        files = [
            _File(str(f["name"]), str(f["sha256"]), int(f["size_bytes"])) for f in manifest.get("files", [])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {ref} cannot be read") from error
    if not files or not all(_FILE_NAME.fullmatch(file.name) for file in files):
        raise ServiceError(Reason.DIGEST_MISMATCH, f"the manifest of {ref} names no files, or wrong ones")
    # Optimizer, gradient and counters of a checkpoint stay where they are.
    return [file for file in files if not ref.checkpoint or _WEIGHTS.fullmatch(file.name)]


def _take_local(source: Path, work: Path, files: list[_File]) -> bool:
    """Link or copy the files if all are there and match; a link stays when the trainer deletes its own."""
    for file in files:
        path = source / file.name
        if not path.is_file():
            return False
        try:
            os.link(path, work / file.name)
        except OSError:
            try:
                shutil.copyfile(path, work / file.name)
            except FileNotFoundError:
                return False
        if _sha256(work / file.name) != file.sha256:
            log.warning("a local file does not match its manifest; using the object store", path=str(path))
            for left in work.iterdir():
                left.unlink()
            return False
    return True


def _rename(work: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
