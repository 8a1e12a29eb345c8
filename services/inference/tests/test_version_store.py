"""Files of versions on this host."""

from pathlib import Path

import pytest
from services.inference.tests.serving import publish

from opentinker_inference.adapters.version_store import ObjectVersionStore
from opentinker_inference.domain.versions import ModelRef
from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import MemoryObjectStore
from opentinkerapi.runtime.reasons import Reason

POLICY = "policies/p"


@pytest.fixture
def objects() -> MemoryObjectStore:
    return MemoryObjectStore()


@pytest.fixture
def store(objects: MemoryObjectStore, tmp_path: Path) -> ObjectVersionStore:
    return ObjectVersionStore(
        objects, tmp_path / "cache", model_dir=tmp_path, base_digest="", max_rank=8, validate=False
    )


async def test_files_stay_while_an_engine_reads_them(
    objects: MemoryObjectStore, store: ObjectVersionStore, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    for version in range(40):
        (weights / "adapter_model.safetensors").write_bytes(bytes([version]))
        await publish(objects, POLICY, version, weights)
    async with store.hold(ModelRef(POLICY, 0)) as held:
        assert held is not None
        for version in range(1, 20):
            await store.fetch(ModelRef(POLICY, version))
        assert (held.directory / "adapter_model.safetensors").read_bytes() == b"\0"
    for version in range(20, 40):
        await store.fetch(ModelRef(POLICY, version))
    assert not held.directory.exists(), "versions fill the disk"


async def test_a_version_that_was_lost_is_not_waited_for(
    objects: MemoryObjectStore, store: ObjectVersionStore, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "adapter_model.safetensors").write_bytes(b"x")
    await publish(objects, POLICY, 1, weights, upload=False, facts={"lost": True})
    with pytest.raises(ServiceError) as caught:
        await store.fetch(ModelRef(POLICY, 1))
    assert caught.value.reason is Reason.VERSION_NOT_FOUND
