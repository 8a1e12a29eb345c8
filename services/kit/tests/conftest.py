"""A small real server: three kinds of calls whose behaviour each test chooses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from opentinker_kit.auth import AuthPolicy
from opentinker_kit.server import KitServer, build_server
from opentinker_kit.settings import ServerSettings
from opentinkerapi.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from opentinkerapi.run.v1 import blob_service_pb2, blob_service_pb2_grpc
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.trainer.v1 import trainer_service_pb2, trainer_service_pb2_grpc

CALLER_KEY, SERVICE_KEY = "caller-key", "service-key"
BLOB = "opentinkerapi.run.v1.BlobService"
INFERENCE = "opentinkerapi.inference.v1.InferenceService"
TRAINER = "opentinkerapi.trainer.v1.TrainerService"
METHODS = {
    f"/{BLOB}/CreateUpload": "caller",
    f"/{BLOB}/GetDownload": "service",
    f"/{INFERENCE}/Sample": "caller",
    f"/{INFERENCE}/ListModels": "caller",
    f"/{TRAINER}/ForwardBackward": "caller",
}


async def _nothing() -> None:
    return None


@dataclass
class Behavior:
    """What the servicers do; `seen` are the requests that reached them."""

    upload: Callable[[], Awaitable[None]] = _nothing
    sample: Callable[[], Awaitable[None]] = _nothing
    seen: list[Any] = field(default_factory=list)


class _Blobs(blob_service_pb2_grpc.BlobServiceServicer):
    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior

    async def CreateUpload(self, request: Any, context: Any) -> blob_service_pb2.CreateUploadResponse:
        self._behavior.seen.append(request)
        await self._behavior.upload()
        return blob_service_pb2.CreateUploadResponse(url="put-here")

    async def GetDownload(self, request: Any, context: Any) -> blob_service_pb2.GetDownloadResponse:
        return blob_service_pb2.GetDownloadResponse(url="get-here")


class _Inference(inference_service_pb2_grpc.InferenceServiceServicer):
    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior

    async def Sample(self, request: Any, context: Any) -> AsyncIterator[inference_service_pb2.SampleResponse]:
        self._behavior.seen.append(request)
        yield inference_service_pb2.SampleResponse()
        await self._behavior.sample()
        yield inference_service_pb2.SampleResponse()


class _Trainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    def __init__(self, behavior: Behavior) -> None:
        self._behavior = behavior

    async def ForwardBackward(
        self, requests: Any, context: Any
    ) -> trainer_service_pb2.ForwardBackwardResponse:
        async for request in requests:
            self._behavior.seen.append(request)
        return trainer_service_pb2.ForwardBackwardResponse()


@dataclass
class Running:
    """A started server with its behavior, and how to call it."""

    server: KitServer
    behavior: Behavior

    def channel(self, key: str | None = CALLER_KEY, **options: Any) -> grpc.aio.Channel:
        return open_channel(f"127.0.0.1:{self.server.port}", key=key, **options)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts servers with the given settings; they are drained at the end."""
    started: list[KitServer] = []

    async def run(auth: AuthPolicy | None = None, serving: bool = True, **settings: Any) -> Running:
        behavior = Behavior()

        def register(server: grpc.aio.Server) -> None:
            blob_service_pb2_grpc.add_BlobServiceServicer_to_server(_Blobs(behavior), server)
            inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(behavior), server)
            trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(_Trainer(behavior), server)

        server = build_server(
            ServerSettings(**settings),
            register,
            service_names=[BLOB, INFERENCE, TRAINER],
            auth=auth or AuthPolicy(CALLER_KEY, SERVICE_KEY, METHODS),
        )
        await server.start()
        if serving:
            await server.set_serving(True)
        started.append(server)
        return Running(server, behavior)

    yield run
    await asyncio.gather(*(server.drain() for server in started))
