"""A trainer and an inference server of a check, in this process (their engines are children)."""

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from opentinker_inference.bootstrap import InferenceServer
from opentinker_inference.settings import InferenceSettings
from opentinker_kit.events import NullEventBus
from opentinker_kit.objects import ObjectStore
from opentinker_kit.testing import wait_until
from opentinker_trainer.bootstrap import TrainerServer
from opentinker_trainer.settings import TrainerSettings
from opentinkerapi.runtime.channels import open_channel
from scripts.gpu_checks import Setup

START_S = 240.0


@contextlib.asynccontextmanager
async def training(setup: Setup, objects: ObjectStore, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A trainer server, its model loaded."""
    with tempfile.TemporaryDirectory(dir=setup.scratch) as directory:
        server = TrainerServer(
            TrainerSettings(
                base_model=setup.model,
                device=setup.device,
                state_dir=Path(directory),
                allow_any_model_dir=True,
                recovery_every_steps=10_000,
                **settings,
            ),
            objects=objects,
            bus=NullEventBus(),
        )
        await server.start()
        try:
            await wait_until(lambda: server.admission.limits is not None, START_S, what="the trainer")
            async with open_channel(server.server.address) as channel:
                yield channel
        finally:
            server.server.request_drain()
            await server.run()


@contextlib.asynccontextmanager
async def sampling(setup: Setup, objects: ObjectStore, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    """An inference server, its engine running."""
    with tempfile.TemporaryDirectory(dir=setup.scratch) as directory:
        server = InferenceServer(
            InferenceSettings(
                base_model=setup.model,
                engine=setup.engine,
                state_dir=Path(directory),
                allow_any_model_dir=True,
                context_tokens=1024,
                engine_start_s=START_S,
                drain_s=1.0,
                **settings,
            ),
            objects=objects,
        )
        port = await server.start()
        try:
            await server.engine.wait_started()
            async with open_channel(f"127.0.0.1:{port}") as channel:
                yield channel
        finally:
            await server.close()
