"""Fixtures of the client's tests."""

from collections.abc import Iterator

import pytest
from client.tests.doubles.cluster import World, world


@pytest.fixture(autouse=True)
def tokenizer_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's caches."""
    monkeypatch.setenv("OPENTINKER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("OPENTINKER_PROGRESS", "0")


@pytest.fixture
def doubles() -> Iterator[World]:
    """Scheduler, trainer and inference doubles, and a cluster connected to them."""
    with world() as made:
        yield made
