"""Tokenizers of models, from the servers that hold the models; kept by digest."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import grpc.aio

from opentinker_gateway.adapters.channels import typed_failures
from opentinker_gateway.domain.prompts import ChatPrompts
from opentinker_kit.errors import ServiceError
from opentinkerapi.data.v1 import tokenizer_pb2
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.render import FILES, ChatTokenizer

MAX_TOKENIZERS = 16
MAX_FILE_BYTES = 64 << 20
Metadata = Sequence[tuple[str, str]]


class Tokenizers:
    """What was fetched, the newest last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, ChatPrompts] = OrderedDict()
        self._fetching = asyncio.Lock()

    async def of(self, channel: grpc.aio.Channel, digest: str, metadata: Metadata) -> ChatPrompts:
        """The tokenizer with that digest, which the server behind `channel` has."""
        async with self._fetching:
            if digest not in self._kept:
                self._kept[digest] = await _fetch(InferenceServiceStub(channel), metadata)
                if len(self._kept) > MAX_TOKENIZERS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(digest)
            return self._kept[digest]


async def _fetch(stub: InferenceServiceStub, metadata: Metadata) -> ChatPrompts:
    listed: list[tokenizer_pb2.TokenizerFile] = []
    runs: dict[str, bytearray] = {}
    with typed_failures():
        async for part in stub.GetTokenizer(pb.GetTokenizerRequest(), metadata=metadata):
            listed += [file for file in part.files if file.name in FILES]
        if sum(file.size_bytes for file in listed) > MAX_FILE_BYTES:
            raise ServiceError(Reason.TOKENIZER_NOT_FOUND, "the model's tokenizer files are too large")
        wanted = pb.GetTokenizerRequest(sha256s=sorted({file.sha256 for file in listed}))
        async for part in stub.GetTokenizer(wanted, metadata=metadata):
            for file in part.files:
                runs.setdefault(file.sha256, bytearray()).extend(file.data)
    files = {file.name: bytes(runs.get(file.sha256, b"")) for file in listed}
    for file in listed:
        if hashlib.sha256(files[file.name]).hexdigest() != file.sha256:
            raise ServiceError(Reason.DIGEST_MISMATCH, f"tokenizer file {file.name} came with other bytes")
    return ChatPrompts(await asyncio.to_thread(ChatTokenizer, files))
