"""The operation protocol over the wire, on the no-op engine and a real object store."""

import asyncio

import grpc
import pytest
from services.trainer.tests.builders import ragged_batch, sample
from services.trainer.tests.server.harness import (
    DONE,
    FAILED,
    Client,
    cross_entropy,
    message,
    pb,
    refused,
)

from opentinker_trainer.domain.losses import LOSS_NAMES
from opentinkerapi.data.v1 import loss_pb2
from opentinkerapi.runtime.errors import from_rpc_error
from opentinkerapi.runtime.reasons import Reason


async def test_operations_run_in_order_whatever_the_order_of_arrival(noop: Client) -> None:
    rows = ragged_batch()
    first, second, third, fourth = (noop.header(seq) for seq in (1, 2, 3, 4))
    late = [
        asyncio.create_task(noop.call("PublishWeights", pb.PublishWeightsRequest(header=fourth))),
        asyncio.create_task(noop.call("OptimStep", noop.step_request([1, 2], third))),
        asyncio.create_task(noop.forward_backward(rows, header=second, chunks=3)),
    ]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in late)
    await noop.forward_backward(rows, header=first)
    await asyncio.gather(*late)
    ended = [await noop.result(seq) for seq in (1, 2, 3, 4)]
    assert [operation.state for operation in ended] == [DONE] * 4
    assert ended[2].optim_step.step == 1
    assert ended[3].publish_weights.version.version == 1


async def test_a_repetition_runs_once(noop: Client) -> None:
    """B93: the reply was lost, the same request comes again; another body is refused."""
    header = noop.header(1, "mine")
    for _ in range(2):
        assert (await noop.forward_backward(ragged_batch(), header=header)).request_id == "mine"
    step = noop.step_request([1], noop.header(2, "step"))
    for _ in range(3):
        await noop.call("OptimStep", step)
        await noop.result(2)
    described = await noop.call("GetPolicy", pb.GetPolicyRequest(policy=noop.policy))
    assert (described.step, described.next_seq, described.ended_seq) == (1, 3, 2)

    other = noop.step_request([1], noop.header(2, "step"))
    other.adamw.learning_rate = 0.5
    assert (await refused(noop.call("OptimStep", other))).reason == Reason.REQUEST_ID_REUSED
    other = noop.step_request([1], noop.header(2, "another"))
    assert (await refused(noop.call("OptimStep", other))).reason == Reason.SEQ_REUSED
    other = noop.step_request([1], noop.header(3, "mine"))
    assert (await refused(noop.call("OptimStep", other))).reason == Reason.REQUEST_ID_REUSED


async def test_no_step_on_half_a_gradient(noop: Client) -> None:
    await noop.forward_backward(ragged_batch(), header=noop.header(1))
    await noop.forward_backward(ragged_batch(), header=noop.header(2))
    for seq, named in [(3, [1]), (4, [1, 2, 3])]:
        await noop.call("OptimStep", noop.step_request(named, noop.header(seq)))
        ended = await noop.result(seq)
        assert ended.state == FAILED
        assert "nothing was changed" in ended.error.message
    described = await noop.call("GetPolicy", pb.GetPolicyRequest(policy=noop.policy))
    assert list(described.open_forward_backward_seqs) == [1, 2]
    await noop.call("OptimStep", noop.step_request([1, 2], noop.header(5)))
    assert (await noop.result(5)).optim_step.step == 1


async def test_a_gap_is_refused_and_the_seqs_are_free_again(noop: Client) -> None:
    error = await refused(noop.call("OptimStep", noop.step_request([1], noop.header(3)), timeout=20))
    assert error.reason == Reason.SEQ_GAP
    assert error.metadata["next_seq"] == "1"
    await noop.forward_backward(ragged_batch(), header=noop.header(1))
    await noop.forward_backward(ragged_batch(), header=noop.header(2))
    await noop.call("OptimStep", noop.step_request([1, 2], noop.header(3, "other")))
    assert (await noop.result(3)).state == DONE


async def test_watch_tells_every_end_in_order_until_it_is_acknowledged(noop: Client) -> None:
    watch = noop.stub.WatchOperations(pb.WatchOperationsRequest(policy=noop.policy))
    for _ in range(2):
        operation = await noop.forward_backward(ragged_batch())
        await noop.step([operation.seq])
    seen = [(await watch.read()).operation.seq for _ in range(4)]
    assert seen == [1, 2, 3, 4]
    watch.cancel()

    operation = await noop.forward_backward(ragged_batch(), header=noop.header(5, acked=3))
    again = noop.stub.WatchOperations(pb.WatchOperationsRequest(policy=noop.policy, after_seq=3))
    assert [(await again.read()).operation.seq for _ in range(2)] == [4, 5]
    again.cancel()
    gone = noop.stub.WatchOperations(pb.WatchOperationsRequest(policy=noop.policy, after_seq=1))
    with pytest.raises(grpc.RpcError) as caught:
        await gone.read()
    assert from_rpc_error(caught.value).reason == Reason.OPERATION_NOT_FOUND
    lost = pb.GetOperationRequest(policy=noop.policy, seq=3)
    assert (await refused(noop.call("GetOperation", lost))).reason == Reason.OPERATION_NOT_FOUND


async def test_wrong_batches_are_refused_by_index_and_take_no_seq(noop: Client) -> None:
    good = message(sample(4, 3, 1))
    cases = []
    for name in ("behavior_logprobs", "advantages"):
        bad = message(sample(4, 3, 1))
        setattr(bad, name, getattr(bad, name)[:-4] + b"\x00\x00\xc0\x7f")
        cases.append((bad, f"{name}[6] is nan"))
    short = message(sample(4, 3, 1))
    short.loss_mask = short.loss_mask[:-1]
    cases.append((short, "loss_mask has 6 entries for 7 tokens"))
    first = message(sample(4, 3, 1))
    first.loss_mask = b"\x01" * 7
    cases.append((first, "loss_mask[0] is 1"))
    cold = message(sample(4, 3, 1))
    cold.sampling_temperature = 0.0
    cases.append((cold, "sampling_temperature"))
    bare = message(sample(4, 3, 1))
    bare.ClearField("advantages")
    cases.append((bare, "component 'main' needs it"))
    ppo = loss_pb2.LossComponent(name="main", ppo=loss_pb2.PpoLoss(), denominator=3.0)
    for bad, text in cases:
        error = await refused(noop.forward_backward([good, bad], [ppo], header=noop.header(1)))
        assert error.reason == Reason.INVALID_SAMPLE
        assert error.metadata["index"] == "1"
        assert text in error.message
    masked = message(sample(4, 3, 1))
    masked.loss_mask = bytes(7)
    error = await refused(noop.forward_backward([masked], [ppo], header=noop.header(1)))
    assert error.reason == Reason.NO_TRAINABLE_TOKENS
    await noop.forward_backward([good], [ppo], header=noop.header(1))
    assert (await noop.result(1)).state == DONE


async def test_wrong_options_are_refused_by_name(noop: Client) -> None:
    rows = [sample(4, 3, 1)]
    ppo = loss_pb2.PpoLoss(dual_clip=0.5)
    cases = [
        (loss_pb2.LossComponent(name="a", ppo=ppo, denominator=1.0), "losses[0].ppo.dual_clip"),
        (cross_entropy(0.0), "losses[0].denominator"),
        (
            loss_pb2.LossComponent(name="a", cross_entropy=loss_pb2.CrossEntropyLoss()),
            "losses[0].denominator",
        ),
        (
            loss_pb2.LossComponent(
                name="a", registered=loss_pb2.RegisteredLoss(loss="gspo"), denominator=1.0
            ),
            "losses[0].registered.loss",
        ),
        (
            loss_pb2.LossComponent(name="a", value=loss_pb2.ValueLoss(), denominator=1.0),
            "losses[0].value",
        ),
        (
            loss_pb2.LossComponent(
                name="a",
                gspo=loss_pb2.GspoLoss(),
                denominator=1.0,
                correction=loss_pb2.OffPolicyCorrection(kind=loss_pb2.CORRECTION_KIND_NONE),
            ),
            "samples[0].proximal_logprobs",
        ),
    ]
    for loss, field in cases:
        error = await refused(noop.forward_backward(rows, [loss], header=noop.header(1)))
        assert error.field == field
    step = noop.step_request([1], noop.header(1))
    step.adamw.beta1 = 1.5
    assert (await refused(noop.call("OptimStep", step))).field == "adamw.beta1"
    error = await refused(noop.restore("checkpoints/none"))
    assert error.reason == Reason.CHECKPOINT_NOT_FOUND


async def test_policies_are_made_once_for_a_request(noop: Client) -> None:
    first = await noop.create("again")
    second = await noop.create("again")
    assert first == second
    assert first.version.version == 0
    other = await refused(noop.create("again", rank=8))
    assert other.reason == Reason.REQUEST_ID_REUSED
    assert (await refused(noop.create("new", rank=1000))).field == "tuning.lora.rank"
    assert (await refused(noop.create("new", model="other"))).reason == Reason.UNKNOWN_MODEL
    unload = pb.UnloadPolicyRequest(policy=first.policy.name, request_id="bye")
    for _ in range(2):
        await noop.call("UnloadPolicy", unload)
    error = await refused(noop.call("GetPolicy", pb.GetPolicyRequest(policy=first.policy.name)))
    assert error.reason == Reason.POLICY_NOT_FOUND


async def test_capabilities_say_what_the_engine_is(noop: Client) -> None:
    answer = await noop.call("GetCapabilities", pb.GetCapabilitiesRequest())
    assert answer.engine == "noop"
    assert set(answer.losses) == set(LOSS_NAMES)
    assert "ForwardBackward" in answer.methods
