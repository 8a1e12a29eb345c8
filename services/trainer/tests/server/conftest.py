import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services.trainer.tests.server.harness import Client, TrainerProcess

from opentinker_kit.settings import S3Settings

StartTrainer = Callable[..., TrainerProcess]


@pytest.fixture
def bucket(s3: S3Settings) -> S3Settings:
    """An empty bucket on the session's S3 server."""
    return s3.model_copy(update={"bucket": f"t{uuid.uuid4().hex[:16]}"})


@pytest.fixture
async def trainers(tmp_path: Path, bucket: S3Settings, tiny_model_dir: Path) -> AsyncIterator[StartTrainer]:
    """Makes trainer processes that share an object store and end with the test."""
    made: list[TrainerProcess] = []
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model_dir)

    def make(**settings: Any) -> TrainerProcess:
        if "base_model" not in settings:
            settings["base_model"] = str(tmp_path / "models" / "tiny")
            settings["allow_any_model_dir"] = True
        process = TrainerProcess(tmp_path / f"trainer{len(made)}", bucket, **settings)
        made.append(process)
        return process

    yield make
    for process in made:
        process.close()


@pytest.fixture(scope="session")
def noop_trainer(tmp_path_factory: pytest.TempPathFactory, s3: S3Settings) -> Iterator[TrainerProcess]:
    """A trainer with the no-op engine, shared by the session."""
    directory = tmp_path_factory.mktemp("noop-trainer")
    process = TrainerProcess(directory, s3, engine="noop", base_model="tiny", gap_timeout_s=1.0)
    asyncio.run(process.start())
    yield process
    process.close()


@pytest.fixture
async def noop(noop_trainer: TrainerProcess) -> AsyncIterator[Client]:
    """A client of the shared no-op trainer, with a policy of its own."""
    async with noop_trainer.client() as client:
        await client.create(uuid.uuid4().hex)
        yield client
