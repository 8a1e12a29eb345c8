"""Policies of every tuning through the front: what is recorded, what is refused, what memory allows."""

import json
from pathlib import Path

import pytest
from services.trainer.tests.builders import ragged_batch
from services.trainer.tests.server.harness import Client, pb, refused
from services.trainer.tests.server.test_faults import World

from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tensors import unpack_floats

FULL = policy_pb2.Tuning(full=policy_pb2.FullTuning())
ROWS = ragged_batch()[:2]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def create(client: Client, request_id: str, tuning: policy_pb2.Tuning) -> pb.CreatePolicyResponse:
    request = pb.CreatePolicyRequest(request_id=request_id, base_model="tiny", tuning=tuning, seed=7)
    response: pb.CreatePolicyResponse = await client.call("CreatePolicy", request)
    client.policy, client.seq = response.policy.name, 0
    return response


async def test_a_policy_of_all_weights_is_recorded_and_comes_back(world: World) -> None:
    tuning = policy_pb2.Tuning(full=policy_pb2.FullTuning(), value_head=True, activation_checkpointing=True)
    async with world.trainer() as client:
        created = await create(client, "full", tuning)
        assert created.policy.tuning == tuning
        operation = await client.forward_backward(ROWS)
        await client.done(await client.step([operation.seq]))
        await client.done(await client.publish())
        await client.done(await client.save())
        answer = await client.call("GetCapabilities", pb.GetCapabilitiesRequest())
        assert (list(answer.tunings), answer.ranks) == (["lora", "full"], 1)
    version = json.loads(await world.objects.get(world.manifests("versions")[-1]))
    checkpoint = json.loads(await world.objects.get(world.manifests("checkpoints")[-1]))
    assert (version["kind"], version["tuning"], version["value_head"]) == ("full", "full", True)
    assert "rank" not in version
    assert (checkpoint["kind"], checkpoint["tuning"]) == ("checkpoint", "full")
    # A server that starts anew makes it as it was.
    async with world.trainer() as again:
        again.policy = client.policy
        shown = await again.call("GetPolicy", pb.GetPolicyRequest(policy=client.policy))
        assert shown.policy.tuning == tuning
        assert shown.step == 1


async def test_memory_is_estimated_before_a_policy_is_made(world: World) -> None:
    """The fake model has 4,160 weights: 83,200 bytes for a policy of all of them, 1,280 for an adapter."""
    async with world.trainer(memory_limit_bytes=100_000) as client:
        first = await create(client, "first", FULL)
        error = await refused(create(client, "second", FULL))
        assert error.reason == Reason.QUOTA_EXCEEDED
        assert "83200 bytes beside 83200 in use" in str(error)
        await client.create("adapter")
        unload = pb.UnloadPolicyRequest(policy=first.policy.name, request_id="unload")
        await client.call("UnloadPolicy", unload)
        await create(client, "second", FULL)


async def test_values_are_of_policies_with_a_head(noop: Client) -> None:
    error = await refused(noop.forward(ROWS, return_values=True))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "return_values")
    model = (await noop.call("GetPolicy", pb.GetPolicyRequest(policy=noop.policy))).policy.base_model
    assert model == "tiny"
    await create(
        noop, f"head-{noop.policy}", policy_pb2.Tuning(full=policy_pb2.FullTuning(), value_head=True)
    )
    error = await refused(noop.forward(ROWS, return_values=True, use_base_model=True))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "return_values")
    noop.seq = 0
    done = await noop.done(await noop.forward(ROWS, return_values=True))
    assert [len(unpack_floats(output.values)) for output in done.forward.outputs] == [
        row.length for row in ROWS
    ]
    plain = await noop.done(await noop.forward(ROWS))
    assert not any(output.values for output in plain.forward.outputs)


async def test_dropout_is_refused_by_name(noop: Client) -> None:
    lora = policy_pb2.LoraTuning(rank=4, dropout=0.05)
    error = await refused(create(noop, "dropout", policy_pb2.Tuning(lora=lora)))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED_OPTION, "tuning.lora.dropout")
