"""Checkpoints as models: their weights are served, what else lies beside them is left alone."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from services.inference.tests.adapters_for_tests import sha256, write_adapter
from services.inference.tests.engine_helpers import reference_logprobs
from services.inference.tests.serving import Client, publish, serving
from services.inference.tests.test_full_weights import write_model

from opentinker_inference.domain.versions import ModelRef, policy_of, version_of
from opentinker_kit.testing.models import build_tiny_qwen3
from opentinkerapi.inference.v1 import inference_service_pb2 as pb
from opentinkerapi.inference.v1 import sampling_pb2
from opentinkerapi.runtime.errors import InvalidArgument, NotFound
from opentinkerapi.runtime.reasons import Reason

PROMPT = tuple(b"2 + 2 = ")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["adapter", "merged"])
async def client(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Client]:
    options = {"serving_mode": request.param, "threads": 1, "context_tokens": 128}
    async with serving(tiny_model_dir, tmp_path_factory.mktemp("checkpoints"), **options) as started:
        yield started


async def save(me: Client, checkpoint: str, directory: Path) -> str:
    """What a trainer saves: weights with everything else that it needs to go on."""
    name = f"{me.policy}/checkpoints/{checkpoint}"
    (directory / "optimizer.safetensors").write_bytes(b"large, and no tensors")
    (directory / "state.json").write_text("{}")
    files = [
        {"name": path.name, "sha256": sha256(path), "size_bytes": path.stat().st_size}
        for path in sorted(directory.iterdir())
    ]
    for path in directory.iterdir():
        if path.name not in ("optimizer.safetensors", "state.json"):
            await me.objects.put(f"{name}/{path.name}", path.read_bytes())
    manifest = {"policy": me.policy, "kind": "checkpoint", "files": files}
    await me.objects.put(f"{name}/manifest.json", json.dumps(manifest).encode())
    return name


def request(me: Client, request_id: str, checkpoint: str) -> pb.SampleRequest:
    made = me.request(request_id, seed=3)
    made.model.CopyFrom(sampling_pb2.ModelRef(checkpoint=checkpoint))
    return made


async def test_an_adapter_of_a_checkpoint_is_served(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    me = client.named("lora")
    old, new = tmp_path / "old", tmp_path / "new"
    write_adapter(old, tiny_model_dir, seed=1)
    write_adapter(new, tiny_model_dir, seed=2)
    await publish(me.objects, me.policy, 1, new)
    name = await save(me, "c000000000007", old)
    first = await me.send(request(me, "first", name))
    want = reference_logprobs(tiny_model_dir, old, PROMPT, first.ids())
    assert first.logprobs() == pytest.approx(want, abs=1e-4)
    spans = first.completions[0].version_spans
    assert [(span.start, span.end, span.version) for span in spans] == [(0, len(first.ids()), -1)]
    listed = await me.stub.ListModels(pb.ListModelsRequest())
    assert name in [model.model.checkpoint for model in listed.models]
    newest = await me.sample("newest", seed=3, version=1)
    assert newest.outcome() != first.outcome()
    assert (await me.send(request(me, "again", name))).outcome() == first.outcome()


async def test_a_whole_model_of_a_checkpoint_is_served_merged(
    client: Client, tiny_model_dir: Path, tmp_path: Path
) -> None:
    if client.server.domain.info.serving_mode != "merged":
        pytest.skip("whole models are served merged")
    me = client.named("full")
    saved = write_model(tmp_path / "saved", build_tiny_qwen3(tmp_path / "other", seed=9))
    reply = await me.send(request(me, "one", await save(me, "c1", saved)))
    want = reference_logprobs(saved, None, PROMPT, reply.ids())
    assert reply.logprobs() == pytest.approx(want, abs=1e-4)


async def test_names_that_are_none_are_refused(client: Client) -> None:
    me = client.named("none")
    missing = await me.failure(request(me, "missing", f"{me.policy}/checkpoints/c1"))
    assert isinstance(missing, NotFound)
    assert missing.reason == Reason.CHECKPOINT_NOT_FOUND
    for number, name in enumerate(("c1", f"{me.policy}/checkpoints/../x", f"{me.policy}/versions/1", "")):
        error = await me.failure(request(me, f"bad{number}", name))
        assert isinstance(error, InvalidArgument), name
        assert "model.checkpoint" in str(error.violations), name


async def test_engines_know_checkpoints_by_their_names() -> None:
    ref = ModelRef(policy="policies/p", version=-1, checkpoint="c7")
    assert ref.key == "policies/p/checkpoints/c7"
    assert (policy_of(ref.key), version_of(ref.key)) == ("policies/p", -1)
    assert (policy_of("policies/p/versions/12"), version_of("policies/p/versions/12")) == ("policies/p", 12)
    assert (policy_of(""), version_of("")) == ("", 0)
