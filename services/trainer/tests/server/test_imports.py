"""Weights that somebody else made, as the start of a policy: taken to the bit, or refused by name."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.server.conftest import StartTrainer
from services.trainer.tests.server.harness import Client, TrainerProcess, pb, refused

from opentinker_kit.objects import S3ObjectStore
from opentinker_kit.settings import S3Settings
from opentinker_kit.testing import wait_until
from opentinker_kit.testing.models import build_tiny_qwen3
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.data.v1 import blob_pb2
from opentinkerapi.runtime.errors import OpenTinkerError
from opentinkerapi.runtime.reasons import Reason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
Files = dict[str, bytes]
Tensors = dict[str, np.ndarray]


class Importer:
    """Makes policies from files."""

    def __init__(self, process: TrainerProcess, client: Client, objects: S3ObjectStore) -> None:
        self.process, self.client, self.objects = process, client, objects

    async def request(self, request_id: str, files: Files, **more: Any) -> pb.CreatePolicyRequest:
        wanted = []
        for name, data in files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            await self.objects.put(f"blobs/{sha256}", data)
            blob = blob_pb2.BlobRef(sha256=sha256, size_bytes=len(data))
            wanted.append(pb.WeightFile(name=name, blob=blob))
        lora = policy_pb2.LoraTuning(rank=4, alpha=16.0, target_modules=["q_proj", "down_proj"])
        more.setdefault("tuning", policy_pb2.Tuning(lora=lora))
        model = self.process.settings["base_model"]
        return pb.CreatePolicyRequest(request_id=request_id, base_model=model, import_files=wanted, **more)

    async def create(self, request: pb.CreatePolicyRequest) -> pb.CreatePolicyResponse:
        made = await self.client.call("CreatePolicy", request)
        self.client.policy, self.client.seq = made.policy.name, 0
        return made


async def test_an_adapter_comes_back_to_the_bit(trainers: StartTrainer, bucket: S3Settings) -> None:
    process = trainers()
    await process.start()
    objects = S3ObjectStore(bucket)
    async with process.client() as client:
        importer = Importer(process, client, objects)
        template = await importer.request("template", {})
        del template.import_files[:]
        await importer.create(template)
        operation = await client.forward_backward(ragged_batch())
        await client.done(await client.step([operation.seq]))
        published = (await client.done(await client.publish())).publish_weights.version
        manifest = json.loads(await objects.get(published.manifest_key))
        folder = Path(manifest["local_path"])
        good = {name: (folder / name).read_bytes() for name in (CONFIG, TENSORS)}

        for number, (change, text, field) in enumerate(wrong_adapters()):
            files = change(dict(good))
            error = await refused(importer.create(await importer.request(f"bad{number}", files)))
            assert text in error.message, (number, error.message)
            assert error.field == field, (number, error.field)
        flipped = await importer.request("flipped", good)
        sha256 = flipped.import_files[1].blob.sha256
        data = bytearray(good[TENSORS])
        data[-1] ^= 1
        await objects.put(f"blobs/{sha256}", bytes(data))
        error = await refused(importer.create(flipped))
        assert error.reason == Reason.DIGEST_MISMATCH
        assert TENSORS in error.message
        await objects.delete(f"blobs/{sha256}")
        assert (await refused(importer.create(flipped))).reason == Reason.BLOB_NOT_FOUND
        saved = await importer.request("both", good, from_checkpoint="policies/p/checkpoints/c")
        assert (await refused(importer.create(saved))).reason == Reason.UNSUPPORTED_COMBINATION

        # Nothing of that is left: the same request, put right, makes the policy.
        request = await importer.request("flipped", good)
        made = await importer.create(request)
        assert made.version.sha256 == published.sha256
        # It needs the uploaded files no more, whatever happens to the server.
        for name in list(good):
            await objects.delete(f"blobs/{hashlib.sha256(good[name]).hexdigest()}")
        await restart(process, client)
        again = (await client.done(await client.publish())).publish_weights.version
        assert again.sha256 == published.sha256
        operation = await client.forward_backward(ragged_batch())
        await client.done(await client.step([operation.seq]))


async def restart(process: TrainerProcess, client: Client) -> None:
    """Kill the server, and wait until the next one holds the policy."""
    process.kill()
    await process.start()

    async def held() -> bool:
        try:
            await client.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
        except OpenTinkerError:
            return False
        return True

    await wait_until(held, 60, what="the policy is back")


def wrong_adapters() -> list[tuple[Callable[[Files], Files], str, str]]:
    """A change to the files, what the refusal says, the field it names."""

    def config(**values: object) -> Callable[[Files], Files]:
        return lambda files: {**files, CONFIG: json.dumps(json.loads(files[CONFIG]) | values).encode()}

    def tensors(change: Callable[[Tensors], None]) -> Callable[[Files], Files]:
        def changed(files: Files) -> Files:
            found = {name: value.copy() for name, value in load(files[TENSORS]).items()}
            change(found)
            return {**files, TENSORS: save(found)}

        return changed

    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def poison(found: Tensors) -> None:
        found[name][0, 0] = np.nan

    return [
        (config(r=8), "r is 8 there, 4", f"import_files[{CONFIG}]"),
        (config(lora_alpha=32), "lora_alpha is 32 there, 16", f"import_files[{CONFIG}]"),
        (config(use_dora=True), "use_dora", f"import_files[{CONFIG}]"),
        (config(use_rslora=True), "use_rslora", f"import_files[{CONFIG}]"),
        (config(base_model_name_or_path="org/other-model"), "other-model", f"import_files[{CONFIG}]"),
        (lambda files: {**files, CONFIG: b"{"}, "cannot be read", f"import_files[{CONFIG}]"),
        (
            tensors(lambda found: found.update({name.replace("layers.0", "layers.9"): found[name]})),
            "layers.9",
            "import_files",
        ),
        (tensors(lambda found: found.pop(name)), name, "import_files"),
        (tensors(lambda found: found.update({name: found[name][:, 1:].copy()})), name, "import_files"),
        (tensors(poison), "NaN", f"import_files[{TENSORS}]"),
        (lambda files: {**files, TENSORS: files[TENSORS][:-8]}, "cut short", f"import_files[{TENSORS}]"),
        (lambda files: {**files, TENSORS: b"junk"}, "no valid safetensors", f"import_files[{TENSORS}]"),
        (lambda files: {TENSORS: files[TENSORS]}, CONFIG, "import_files"),
        (lambda files: {**files, "../x": b"x"}, "'../x'", "import_files[2].name"),
        (lambda files: {**files, "adapter_model.bin": b"x"}, "adapter_model.bin", "import_files[2].name"),
    ]


async def test_a_whole_model_is_taken(trainers: StartTrainer, bucket: S3Settings, tmp_path: Path) -> None:
    process = trainers()
    await process.start()
    objects = S3ObjectStore(bucket)
    tuning = policy_pb2.Tuning(full=policy_pb2.FullTuning())
    other = build_tiny_qwen3(tmp_path / "other", seed=8)
    good = {name: (other / name).read_bytes() for name in ("config.json", "model.safetensors")}
    async with process.client() as client:
        importer = Importer(process, client, objects)
        config = json.dumps(json.loads(good["config.json"]) | {"rope_theta": 5000.0}).encode()
        request = await importer.request("bad", {**good, "config.json": config}, tuning=tuning)
        error = await refused(importer.create(request))
        assert "rope_theta" in error.message
        assert error.field == "import_files[config.json]"
        wide = load(good["model.safetensors"])
        wide["model.norm.weight"] = np.ones(3, np.float32)
        request = await importer.request("bad2", {**good, "model.safetensors": save(wide)}, tuning=tuning)
        assert "model.norm.weight" in (await refused(importer.create(request))).message

        made = await importer.create(await importer.request("good", good, tuning=tuning))
        manifest = json.loads(await objects.get(made.version.manifest_key))
        assert manifest["kind"] == "full"
        stored = load(await objects.get(f"{made.version.name}/model.safetensors"))
        given = load(good["model.safetensors"])
        assert stored.keys() == given.keys()
        assert all(np.array_equal(stored[name], given[name]) for name in given)
        await restart(process, client)
        again = (await client.done(await client.publish())).publish_weights.version
        assert again.sha256 == made.version.sha256
