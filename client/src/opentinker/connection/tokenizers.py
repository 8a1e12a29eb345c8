"""The tokenizer of a model, from the inference service that serves it: fetched by digest, cached on disk."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from opentinker import errors
from opentinker.connection.calls import stream
from opentinker.connection.jobs import Job, Link, Role
from opentinkerapi.inference.v1 import inference_service_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from opentinkerapi.runtime.render import ChatTokenizer

_built: dict[str, "ChatTokenizer"] = {}


def cache_dir() -> Path:
    """Where tokenizer files are kept, by their SHA-256; `OPENTINKER_CACHE_DIR` moves it."""
    root = os.environ.get("OPENTINKER_CACHE_DIR")
    if root:
        return Path(root) / "tokenizers"
    import platformdirs

    return Path(platformdirs.user_cache_dir("opentinker")) / "tokenizers"


async def fetch_tokenizer(job: Job) -> "ChatTokenizer":
    """The tokenizer of the model that the job's inference slot serves."""
    listing = await job.through(Role.INFERENCE, _list)
    if listing.digest and listing.digest in _built:
        return _built[listing.digest]
    cached = {file.name: _read(file.sha256) for file in listing.files}
    missing = [file for file in listing.files if cached[file.name] is None]
    fetched = await job.through(Role.INFERENCE, lambda link: _fetch(link, missing)) if missing else {}
    files = {name: data for name, data in {**cached, **fetched}.items() if data is not None}

    from opentinkerapi.runtime.render import ChatTokenizer

    tokenizer = ChatTokenizer(files)
    if listing.digest:
        _built[listing.digest] = tokenizer
    return tokenizer


async def _list(link: Link) -> inference_service_pb2.GetTokenizerResponse:
    listing = inference_service_pb2.GetTokenizerResponse()
    request = inference_service_pb2.GetTokenizerRequest()
    async for part in stream(InferenceServiceStub(link.channel).GetTokenizer(request)):
        listing.MergeFrom(part)
    return listing


async def _fetch(link: Link, files: list[inference_service_pb2.TokenizerFile]) -> dict[str, bytes]:
    """Stream files by digest, check them, keep them."""
    request = inference_service_pb2.GetTokenizerRequest(sha256s=sorted({file.sha256 for file in files}))
    runs: dict[str, bytearray] = {}
    async for part in stream(InferenceServiceStub(link.channel).GetTokenizer(request)):
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
