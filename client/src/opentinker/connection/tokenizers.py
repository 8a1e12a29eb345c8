"""The tokenizer of a model, from a server of the job: fetched by digest, cached on disk."""

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker import errors
from opentinker.connection.calls import stream
from opentinker.connection.jobs import Job, Link, Role
from opentinkerapi.data.v1 import tokenizer_pb2
from opentinkerapi.inference.v1 import inference_service_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.trainer.v1 import trainer_service_pb2
from opentinkerapi.trainer.v1.trainer_service_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from opentinkerapi.runtime.render import ChatTokenizer

_Response = inference_service_pb2.GetTokenizerResponse | trainer_service_pb2.GetTokenizerResponse

_built: dict[str, "ChatTokenizer"] = {}


def cache_dir() -> Path:
    """Where tokenizer files are kept, by their SHA-256; `OPENTINKER_CACHE_DIR` moves it."""
    root = os.environ.get("OPENTINKER_CACHE_DIR")
    if root:
        return Path(root) / "tokenizers"
    import platformdirs

    return Path(platformdirs.user_cache_dir("opentinker")) / "tokenizers"


async def fetch_tokenizer(job: Job) -> "ChatTokenizer":
    """The tokenizer of the job's model, from its inference slot or, where it has none, its trainer slot."""
    role = Role.INFERENCE if Role.INFERENCE in job.roles else Role.TRAINER
    listing = await job.through(role, _list)
    if listing.digest and listing.digest in _built:
        return _built[listing.digest]
    cached = {file.name: _read(file.sha256) for file in listing.files}
    missing = [file for file in listing.files if cached[file.name] is None]
    fetched = await job.through(role, lambda link: _fetch(link, missing)) if missing else {}
    files = {name: data for name, data in {**cached, **fetched}.items() if data is not None}

    from opentinkerapi.runtime.render import ChatTokenizer

    tokenizer = ChatTokenizer(files)
    if listing.digest:
        _built[listing.digest] = tokenizer
    return tokenizer


@dataclass(slots=True)
class _Listing:
    digest: str = ""
    files: list[tokenizer_pb2.TokenizerFile] = field(default_factory=list)


async def _list(link: Link) -> _Listing:
    listing = _Listing()
    async for part in _parts(link):
        listing.digest = part.digest or listing.digest
        listing.files += part.files
    return listing


def _parts(link: Link, sha256s: Sequence[str] = ()) -> AsyncIterator[_Response]:
    if link.role is Role.INFERENCE:
        inference = InferenceServiceStub(link.channel)
        return stream(inference.GetTokenizer(inference_service_pb2.GetTokenizerRequest(sha256s=sha256s)))
    trainer = TrainerServiceStub(link.channel)
    return stream(trainer.GetTokenizer(trainer_service_pb2.GetTokenizerRequest(sha256s=sha256s)))


async def _fetch(link: Link, files: list[tokenizer_pb2.TokenizerFile]) -> dict[str, bytes]:
    """Stream files by digest, check them, keep them."""
    runs: dict[str, bytearray] = {}
    async for part in _parts(link, sorted({file.sha256 for file in files})):
        for run in part.files:
            data = runs.setdefault(run.sha256, bytearray())
            if run.offset == len(data):
                data += run.data
    for file in files:
        data = runs.get(file.sha256, bytearray())
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise errors.DataLoss(
                f"tokenizer file {file.name} came with other bytes than its digest says",
                reason=errors.Reason.DIGEST_MISMATCH,
            )
        _write(file.sha256, bytes(data))
    return {file.name: bytes(runs[file.sha256]) for file in files}


def _read(sha256: str) -> bytes | None:
    try:
        data = (cache_dir() / sha256).read_bytes()
    except OSError:
        return None
    # A torn or edited file is fetched again.
    return data if hashlib.sha256(data).hexdigest() == sha256 else None


def _write(sha256: str, data: bytes) -> None:
    """Keep a file; a cache that cannot be written is no reason to fail."""
    import tempfile

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(data)
        os.replace(file.name, folder / sha256)
    except OSError:
        return
