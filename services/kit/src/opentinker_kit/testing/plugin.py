"""Pytest fixtures over `opentinker_kit.testing`; servers start once for a test session, and only if asked
for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker_kit.settings import S3Settings
from opentinker_kit.testing.models import build_tiny_qwen3
from opentinker_kit.testing.postgres import PostgresServer, start_postgres
from opentinker_kit.testing.servers import NatsServer, S3Server, start_nats, start_weed
from opentinker_kit.testing.vision import build_tiny_qwen2_5_vl


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A running nats-server with JetStream, shared by the session."""
    with start_nats(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server, shared by the session."""
    with start_weed(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(s3_server: S3Server) -> S3Settings:
    """How to reach the session's S3 server; its bucket exists."""
    return s3_server.settings


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL, shared by the session. Where it is not installed its tests are skipped, except in
    continuous integration.
    """
    try:
        server = start_postgres()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random model, the same bits every time."""
    return build_tiny_qwen3(tmp_path_factory.mktemp("tiny-qwen3-random"))


@pytest.fixture(scope="session")
def tiny_vision_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny random vision-language model, the same bits every time."""
    return build_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2.5-vl-random"))
