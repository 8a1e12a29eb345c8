"""Checkpoints and published weights: complete or absent, verified, and never overwritten."""

import asyncio
import hashlib
import json
import random
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import DONE, FAILED, Client, TrainerProcess, pb, refused

from opentinker_kit.errors import ServiceError
from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinkerapi.runtime.errors import OpenTinkerError, from_status_data
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import decode

KILLS = 20


async def learn(client: Client, steps: int = 1) -> None:
    for _ in range(steps):
        operation = await client.forward_backward(ragged_batch())
        await client.done(await client.step([operation.seq]))


async def weights(client: Client) -> str:
    """Digest of the current weights."""
    return str((await client.done(await client.publish())).publish_weights.version.sha256)


@pytest.mark.slow
async def test_checkpoints_and_versions(trainers: StartTrainer, bucket: S3Settings) -> None:
    process = trainers()
    await process.start()
    objects = S3ObjectStore(bucket)
    async with process.client() as client:
        created = await client.create(model=process.settings["base_model"])
        await check_version(objects, created.version.manifest_key, created.version.sha256)
        await learn(client, 2)
        published = (await client.done(await client.publish())).publish_weights.version
        assert (published.version, published.step) == (1, 2)
        await check_version(objects, published.manifest_key, published.sha256)

        # With half a gradient waiting: what is restored is restored with it.
        half = await client.forward_backward(ragged_batch()[:4])
        saved = (await client.done(await client.save())).save_checkpoint.checkpoint
        assert (saved.step, saved.version) == (2, 1)
        await client.done(await client.step([half.seq]))
        expected = await weights(client)
        await learn(client)
        restored = (await client.done(await client.restore(saved.name))).restore_checkpoint
        assert restored.step == 2
        # Refused by name, with weights, optimizer and waiting gradient as they were.
        for name, reason, says in await wrong_checkpoints(objects, saved.name):
            failed = await client.result((await client.restore(name)).seq)
            assert failed.state == FAILED
            error = from_status_data(decode(failed.error))
            assert (error.reason, error.field) == (reason, "checkpoint"), error
            assert says in error.message
        await client.done(await client.step([half.seq]))
        assert await weights(client) == expected

        # Another policy of the same shape takes weights and optimizer, not the gradient.
        first = client.policy
        await client.create("from", model=process.settings["base_model"], from_checkpoint=saved.name)
        assert await weights(client) == published.sha256
        error = await refused(client.step([], header=client.header(2)))
        assert error.field == "forward_backward_seqs"
        await client.create("fresh", model=process.settings["base_model"])
        await client.done(await client.restore(saved.name, weights_only=True))
        assert await weights(client) == published.sha256

        await client.create("small", model=process.settings["base_model"], rank=2)
        misfit = await client.result((await client.restore(saved.name)).seq)
        assert misfit.state == FAILED
        assert "rank" in misfit.error.message
        missing = await client.result((await client.restore(f"{first}/checkpoints/none")).seq)
        assert "there is no checkpoint" in missing.error.message

        # B87: a policy in the place of one that was unloaded has a gradient like any other.
        await client.call("UnloadPolicy", pb.UnloadPolicyRequest(policy=client.policy, request_id="u"))
        await client.create("after", model=process.settings["base_model"])
        await learn(client)
        version = (await client.done(await client.publish())).publish_weights.version
        manifest = json.loads(await objects.get(version.manifest_key))
        tensors = load((Path(manifest["local_path"]) / "adapter_model.safetensors").read_bytes())
        assert all(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)

        # A byte that changed is noticed before anything is loaded.
        key = f"{saved.name}/adapter_model.safetensors"
        data = bytearray(await objects.get(key))
        data[-1] ^= 1
        await objects.put(key, bytes(data))
        damaged = await client.result((await client.restore(saved.name)).seq)
        assert "not what was recorded" in damaged.error.message


async def wrong_checkpoints(objects: S3ObjectStore, name: str) -> list[tuple[str, Reason, str]]:
    """Copies of a checkpoint that differ in one thing; the reason of the refusal and what it says."""
    manifest = json.loads(await objects.get(f"{name}/manifest.json"))
    contents = {f["name"]: await objects.get(f"{name}/{f['name']}") for f in manifest["files"]}

    async def write(copy: str, files: dict[str, bytes], facts: dict[str, object]) -> str:
        prefix = f"policies/copy/checkpoints/{copy}"
        for file, data in files.items():
            await objects.put(f"{prefix}/{file}", data)
        await objects.put(f"{prefix}/manifest.json", json.dumps(manifest | facts).encode())
        return prefix

    cases = [("policies/copy/checkpoints/none", Reason.CHECKPOINT_NOT_FOUND, "no checkpoint")]
    for number, file in enumerate(sorted(contents)):
        flipped = bytes([contents[file][0] ^ 1, *contents[file][1:]])
        made = await write(f"flipped{number}", contents | {file: flipped}, {})
        cases.append((made, Reason.DIGEST_MISMATCH, f"{file} is not what was recorded"))
    other = await write("other", contents, {"base_digest": "0" * 64, "base_model": "another"})
    cases.append((other, Reason.INVALID_WEIGHTS, "other base weights (another)"))
    torn = await write("torn", contents, {"sha256": "0" * 64})
    cases.append((torn, Reason.DIGEST_MISMATCH, "manifest"))
    part = {file: data for file, data in contents.items() if file != "optimizer.safetensors"}
    half = await write("half", part, {})
    cases.append((half, Reason.DIGEST_MISMATCH, "optimizer.safetensors is recorded and not there"))
    return cases


async def check_version(objects: S3ObjectStore, key: str, sha256: str) -> None:
    manifest = json.loads(await objects.get(key))
    assert manifest["sha256"] == sha256
    assert manifest["kind"] == "lora"
    local = Path(manifest["local_path"])
    for file in manifest["files"]:
        for _ in range(50):
            if await objects.head(f"{key.rpartition('/')[0]}/{file['name']}"):
                break
            await asyncio.sleep(0.1)
        data = await objects.get(f"{key.rpartition('/')[0]}/{file['name']}")
        assert data == (local / file["name"]).read_bytes()
    tensors = load((local / "adapter_model.safetensors").read_bytes())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"float32"}
    assert json.loads((local / "adapter_config.json").read_text())["r"] == manifest["rank"]


@pytest.mark.slow
async def test_killed_while_saving(trainers: StartTrainer, bucket: S3Settings) -> None:
    """B103: at random moments of checkpoints and recovery checkpoints. What has a manifest is complete."""
    chance = random.Random(0)
    process = trainers(engine="noop", base_model="tiny", recovery_every_steps=1)
    await process.start()
    objects = S3ObjectStore(bucket)
    async with process.client() as client:
        await client.create()
        for _ in range(KILLS):
            await patiently(process, client, lambda: learn_once(client))
            header = client.header()
            saving = asyncio.create_task(save_with(client, header))
            await asyncio.sleep(chance.uniform(0.0, 0.06))
            process.kill()
            await asyncio.gather(saving, return_exceptions=True)
            await process.start()
            await patiently(process, client, lambda h=header: save_with(client, h))
        manifests = [i.key for i in await objects.list("policies/") if i.key.endswith("/manifest.json")]
        assert sum("/checkpoints/" in key for key in manifests) == KILLS
        for key in manifests:
            await check_set(objects, key)
        described = await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
        assert described.step == KILLS
        # Without a scheduler nothing lets checkpoints go, so a wish for it is refused.
        request = pb.SaveCheckpointRequest(header=client.header(), keep_checkpoints=1)
        error = await refused(client.call("SaveCheckpoint", request))
        assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "keep_checkpoints")


async def check_set(objects: S3ObjectStore, key: str) -> None:
    """Every file of a set is what its manifest says. An old recovery checkpoint may be removed meanwhile."""
    missing = ""
    try:
        for file in json.loads(await objects.get(key))["files"]:
            missing = f"{key.rpartition('/')[0]}/{file['name']}"
            data = await objects.get(missing)
            assert hashlib.sha256(data).hexdigest() == file["sha256"], key
    except ServiceError as error:
        if error.reason is not Reason.BLOB_NOT_FOUND or "/recovery/" not in key:
            raise
        gone = await objects.head(key) is None
        assert gone, f"{key} names {missing}, which is not there"


async def learn_once(client: Client) -> None:
    seq = client.seq
    await client.forward_backward(ragged_batch()[:3], header=client.header(seq + 1))
    await client.call("OptimStep", client.step_request([seq + 1], client.header(seq + 2)))
    await client.done_seq(seq + 2)
    client.seq = seq + 2


async def save_with(client: Client, header: object) -> str:
    await client.call("SaveCheckpoint", pb.SaveCheckpointRequest(header=header))  # type: ignore[arg-type]
    ended = await client.result(header.seq)  # type: ignore[attr-defined]
    assert ended.state == DONE, ended.error.message
    return str(ended.save_checkpoint.checkpoint.name)


async def patiently(process: TrainerProcess, client: Client, call):  # type: ignore[no-untyped-def]
    seq = client.seq
    for _ in range(100):
        try:
            return await call()
        except OpenTinkerError as error:
            if error.code.name != "UNAVAILABLE" and error.reason != Reason.POLICY_NOT_FOUND:
                raise
            client.seq = seq
        await asyncio.sleep(0.1)
    raise AssertionError(process.log())


@pytest.mark.slow
async def test_a_full_disk_fails_the_save_and_nothing_else(trainers: StartTrainer, tmp_path: Path) -> None:
    """ENOSPC on a small tmpfs: the checkpoint before stays valid, training goes on."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = await asyncio.create_subprocess_exec(
        "mount",
        "-t",
        "tmpfs",
        "-o",
        "size=1m",
        "tmpfs",
        str(small),
        stderr=asyncio.subprocess.DEVNULL,
    )
    if await mounted.wait() != 0:
        pytest.skip("this environment does not allow a tmpfs to be mounted")
    try:
        process = trainers(recovery_every_steps=1, publish_dir=str(tmp_path / "published"))
        process.settings["state_dir"] = str(small)
        await process.start()
        async with process.client() as client:
            await client.create(model=process.settings["base_model"])
            first = (await client.done(await client.save())).save_checkpoint.checkpoint.name
            (small / "filler").write_bytes(b"x" * (shutil.disk_usage(small).free - 20_000))
            await learn(client)
            second = await client.result((await client.save()).seq)
            assert second.state == FAILED
            assert "No space left" in second.error.message
            after = await weights(client)
            (small / "filler").unlink()
            await client.done(await client.restore(first))
            assert await weights(client) != after
            await learn(client)
            await client.done(await client.save())
        process.close()
    finally:
        await (await asyncio.create_subprocess_exec("umount", "-l", str(small))).wait()
