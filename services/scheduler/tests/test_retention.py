"""Checkpoints end by request, count or age; what a run goes on from stays. Weights are exported."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from services.scheduler.tests.test_catalog_service import policy, refused, register

from opentinker_kit.objects import MemoryObjectStore
from opentinker_kit.testing import wait_until
from opentinkerapi.catalog.v1 import catalog_service_pb2 as pb
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.run.v1 import run_pb2, run_service_pb2
from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.runtime.reasons import Reason

POLICY = "policies/p1"


class Shelf:
    """A scheduler with an object store, a policy, and checkpoints saved as a trainer does."""

    def __init__(self, rig: Any, store: MemoryObjectStore) -> None:
        self.rig, self.store = rig, store

    async def save(self, name: str, keep: int = 0, expire: datetime | None = None) -> str:
        prefix = f"{POLICY}/checkpoints/{name}"
        digest, key = await self.put(prefix, {"adapter_model.safetensors": b"w", "engine.json": b"{}"})
        made = policy_pb2.Checkpoint(name=prefix, sha256=digest, manifest_key=key)
        if expire is not None:
            made.expire_time.FromDatetime(expire)
        request = pb.RegisterCheckpointRequest(policy=POLICY, checkpoint=made, keep_checkpoints=keep)
        await self.rig.catalog.RegisterCheckpoint(request)
        return prefix

    async def put(self, prefix: str, files: dict[str, bytes]) -> tuple[str, str]:
        entries = []
        for name, data in sorted(files.items()):
            await self.store.put(f"{prefix}/{name}", data)
            entries.append(
                {"name": name, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}
            )
        lines = "".join(f"{entry['name']} {entry['sha256']}\n" for entry in entries)
        await self.store.put(f"{prefix}/manifest.json", json.dumps({"files": entries}).encode())
        return hashlib.sha256(lines.encode()).hexdigest(), f"{prefix}/manifest.json"

    async def listed(self) -> list[str]:
        found = await self.rig.catalog.ListCheckpoints(pb.ListCheckpointsRequest(policy=POLICY))
        return [item.name.rpartition("/")[2] for item in found.checkpoints]

    async def stored(self) -> set[str]:
        return {info.key.split("/")[3] for info in await self.store.list(f"{POLICY}/checkpoints/")}

    async def goes_on_from(self, checkpoint: str, step: int) -> None:
        if step == 1:
            made = await self.rig.runs.CreateRun(
                run_service_pb2.CreateRunRequest(request_id="run", run=run_pb2.Run())
            )
            self.run = made.run.name
        state = run_pb2.LoopState(step=step, checkpoint=checkpoint)
        await self.rig.runs.PutLoopState(
            run_service_pb2.PutLoopStateRequest(request_id=f"s{step}", run=self.run, loop_state=state)
        )


@pytest.fixture
async def shelf(start_rig: Any) -> Shelf:
    store = MemoryObjectStore()
    rig = await start_rig({"store": store}, deletion_grace_s=0.0, sweep_every_s=0.05)
    await rig.catalog.RegisterPolicy(register(policy(), attempt=0))
    return Shelf(rig, store)


async def test_the_newest_stay_and_what_a_run_goes_on_from(shelf: Shelf) -> None:
    first = await shelf.save("c1")
    await shelf.goes_on_from(first, 1)
    for number in (2, 3, 4):
        await shelf.save(f"c{number}", keep=2)
    assert await shelf.listed() == ["c4", "c3", "c1"]

    async def swept() -> bool:
        return await shelf.stored() == {"c1", "c3", "c4"}

    await wait_until(swept, 5, what="objects of c2 gone")
    request = pb.DeleteCheckpointRequest(name=first, request_id="d1")
    error = await refused(shelf.rig.catalog.DeleteCheckpoint(request))
    assert error.reason == Reason.INVALID_STATE
    assert shelf.run in error.message
    # Once the run goes on from a later one, the next save lets it go.
    await shelf.goes_on_from(f"{POLICY}/checkpoints/c4", 2)
    await shelf.save("c5", keep=1)
    assert await shelf.listed() == ["c5", "c4"]
    await shelf.rig.catalog.DeleteCheckpoint(
        pb.DeleteCheckpointRequest(name=f"{POLICY}/checkpoints/c5", request_id="d2")
    )

    async def only_four() -> bool:
        return await shelf.stored() == {"c4"}

    await wait_until(only_four, 5, what="objects gone")


async def test_a_restarted_trainer_that_saves_again_deletes_nothing_newer(start_rig: Any) -> None:
    store = MemoryObjectStore()
    rig = await start_rig({"store": store}, sweep_every_s=0.05)
    await rig.catalog.RegisterPolicy(register(policy(), attempt=0))
    shelf = Shelf(rig, store)
    for name in ("c1", "c2", "c3"):
        await shelf.save(name, keep=1)
    assert await shelf.listed() == ["c3"]
    # Its log is run again from before c1. Objects of c1 and c2 still lie there, then no more.
    for name in ("c1", "c2", "c3"):
        await shelf.save(name, keep=1)
    assert await shelf.listed() == ["c3"]
    await rig.scheduler.database.run(lambda tx: tx.catalog.forget_objects(f"{POLICY}/checkpoints/c1"))
    await shelf.save("c1", keep=1)
    assert await shelf.listed() == ["c3"]


async def test_old_ones_expire_but_never_the_newest(shelf: Shelf) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    await shelf.save("c1", expire=past)
    await shelf.save("c2", expire=past + timedelta(hours=1))
    await shelf.save("c3", expire=past)

    async def gone() -> bool:
        return await shelf.listed() == ["c3", "c2"] and await shelf.stored() == {"c2", "c3"}

    await wait_until(gone, 5, what="c1 expired")
    got = await shelf.rig.catalog.GetCheckpoint(pb.GetCheckpointRequest(name=f"{POLICY}/checkpoints/c2"))
    assert got.checkpoint.HasField("expire_time")


async def test_objects_outlive_their_record_for_a_while(start_rig: Any) -> None:
    store = MemoryObjectStore()
    rig = await start_rig({"store": store}, sweep_every_s=0.05)
    await rig.catalog.RegisterPolicy(register(policy(), attempt=0))
    shelf = Shelf(rig, store)
    name = await shelf.save("c1")
    await rig.catalog.DeleteCheckpoint(pb.DeleteCheckpointRequest(name=name, request_id="d"))
    assert await shelf.listed() == []
    await rig.scheduler._retention.sweep(rig.scheduler.database, store)
    assert await shelf.stored() == {"c1"}


async def test_export_lists_the_weights_and_nothing_else(shelf: Shelf) -> None:
    stub = shelf.rig.catalog
    saved = await shelf.save("c1")
    export = await stub.ExportWeights(pb.ExportWeightsRequest(name=saved))
    assert export.kind == "lora"
    assert [file.name for file in export.files] == ["adapter_model.safetensors"]
    assert export.files[0].sha256 == hashlib.sha256(b"w").hexdigest()
    assert export.files[0].size_bytes == 1
    assert export.files[0].url

    files = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": b"1",
        "model-00002-of-00002.safetensors": b"2",
        "model.safetensors.index.json": b"{}",
        "tokenizer.json": b"{}",
        "value_head.safetensors": b"v",
    }
    digest, key = await shelf.put(f"{POLICY}/versions/1", files)
    made = policy_pb2.PolicyVersion(version=1, sha256=digest, manifest_key=key)
    await stub.RegisterVersion(pb.RegisterVersionRequest(policy=POLICY, version=made))
    version = pb.ExportWeightsRequest(name=f"{POLICY}/versions/1")
    export = await stub.ExportWeights(version)
    assert export.kind == "full"
    assert {file.name for file in export.files} == files.keys() - {"value_head.safetensors"}

    # Still being uploaded; another manifest than was recorded; nothing of its own; not there.
    await shelf.store.delete(f"{POLICY}/versions/1/config.json")
    assert (await refused(stub.ExportWeights(version))).reason == Reason.STORAGE_UNAVAILABLE
    await shelf.put(f"{POLICY}/versions/1", {"config.json": b"other"})
    assert (await refused(stub.ExportWeights(version))).reason == Reason.DIGEST_MISMATCH
    digest, key = await shelf.put(f"{POLICY}/versions/2", {})
    made = policy_pb2.PolicyVersion(version=2, sha256=digest, manifest_key=key)
    await stub.RegisterVersion(pb.RegisterVersionRequest(policy=POLICY, version=made))
    base = pb.ExportWeightsRequest(name=f"{POLICY}/versions/2")
    assert (await refused(stub.ExportWeights(base))).reason == Reason.INVALID_STATE
    for name, reason in (
        (f"{POLICY}/versions/9", Reason.VERSION_NOT_FOUND),
        (f"{POLICY}/checkpoints/c9", Reason.CHECKPOINT_NOT_FOUND),
        ("runs/r1", Reason.VERSION_NOT_FOUND),
    ):
        assert (await refused(stub.ExportWeights(pb.ExportWeightsRequest(name=name)))).reason == reason


async def test_of_whole_models_the_newest_stay_and_numbers_stay_taken(shelf: Shelf) -> None:
    stub = shelf.rig.catalog

    async def publish(number: int, data: bytes = b"w") -> None:
        digest, key = await shelf.put(f"{POLICY}/versions/{number}", {"model.safetensors": data})
        made = policy_pb2.PolicyVersion(version=number, sha256=digest, manifest_key=key)
        await stub.RegisterVersion(pb.RegisterVersionRequest(policy=POLICY, version=made, keep_versions=2))

    async def listed() -> list[int]:
        found = await stub.ListVersions(pb.ListVersionsRequest(policy=POLICY))
        return [item.version for item in found.versions]

    async def stored() -> set[str]:
        return {info.key.split("/")[3] for info in await shelf.store.list(f"{POLICY}/versions/")}

    async def swept() -> bool:
        return await stored() == {"2", "3"}

    for number in (1, 2, 3):
        await publish(number)
    assert await listed() == [3, 2, 0]
    await wait_until(swept, 5, what="version 1 gone")
    for call in (
        stub.GetVersion(pb.GetVersionRequest(name=f"{POLICY}/versions/1")),
        stub.ExportWeights(pb.ExportWeightsRequest(name=f"{POLICY}/versions/1")),
    ):
        assert (await refused(call)).reason == Reason.VERSION_NOT_FOUND
    # A trainer that runs its log again stores it anew: it goes again. Other weights never get the number.
    await publish(1)
    await wait_until(swept, 5, what="version 1 gone again")
    with pytest.raises(grpc.RpcError) as taken:
        await publish(1, b"other")
    assert from_rpc_error(taken.value).reason == Reason.ALREADY_REGISTERED
    assert await listed() == [3, 2, 0]


async def test_a_policy_is_recorded_with_all_its_tuning(shelf: Shelf) -> None:
    tuning = policy_pb2.Tuning(full=policy_pb2.FullTuning(), value_head=True, activation_checkpointing=True)
    made = register(policy("policies/p2", tuning=tuning), attempt=0, request_id="r2")
    await shelf.rig.catalog.RegisterPolicy(made)
    got = await shelf.rig.catalog.GetPolicy(pb.GetPolicyRequest(name="policies/p2"))
    assert got.policy.tuning == tuning
