"""The operation channel against a trainer double over real gRPC: order, pipelining, exactly once."""

import asyncio
from typing import Any

import grpc
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.trainer import PolicyState, abort

import opentinker as ot
from opentinker import errors
from opentinker.training.policy import Policy
from opentinker.training.samples import TrainSample
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.status import StatusData

ROW = TrainSample([1, 2, 3, 4], [0, 0, 1, 1], logprobs=[0, 0, -1, -1], advantages=[0, 0, 1, 1])
OTHER = TrainSample([1, 2, 9], [0, 0, 1], logprobs=[0, 0, -2], advantages=[0, 0, -1])


@pytest.fixture
def policy(doubles: World) -> Policy:
    return doubles.cluster.create_policy("tiny", tuning=ot.LoRA(rank=4), seed=7).result()


def state(doubles: World, policy: Policy) -> PolicyState:
    return doubles.trainer.policies[policy.name]


def step(policy: Policy, *rows: TrainSample) -> None:
    """One whole step, awaited at its end only."""
    policy.forward_backward(rows, ot.PPO())
    policy.optim_step(ot.AdamW(lr=1e-3))
    policy.publish().result()


def test_results_come_back_typed(doubles: World, policy: Policy) -> None:
    doubles.trainer.metrics = {"actor/ppo_kl": (1.0, 4.0)}
    gradient = policy.forward_backward([ROW, OTHER], ot.PPO(clip_high=0.28), denominator=3.0)
    update = policy.optim_step(ot.AdamW(lr=1e-3, clip_norm=1.0))
    version = policy.publish()
    saved = policy.save_checkpoint("first")
    assert gradient.result().components["policy"].weight == 3
    assert gradient.result().metrics["actor/ppo_kl"].mean == 0.25
    assert gradient.result().engine_seconds == pytest.approx(0.01)
    assert (update.result().step, update.result().grad_norm) == (1, 0.5)
    assert version.result().version == policy.version == 1
    assert saved.result() == policy.checkpoint
    assert policy.restore(saved.result()).result() == 1
    assert [each.seq for each in (gradient, update, version, saved)] == [1, 2, 3, 4]


def test_operations_are_sent_before_results_arrive(doubles: World, policy: Policy) -> None:
    doubles.trainer.held.clear()
    operations = [policy.forward_backward([ROW], ot.PPO()), policy.optim_step(ot.AdamW()), policy.publish()]

    logged = asyncio.Event()

    async def count(name: str, header: Any, context: Any) -> bool:
        if header.seq == 3:
            logged.set()
        return True

    async def wait() -> None:
        await asyncio.wait_for(logged.wait(), 5)
        doubles.trainer.held.set()

    doubles.trainer.after = count
    assert not any(operation.done for operation in operations)
    doubles.portal.run(wait())
    assert operations[-1].result() is not None
    assert doubles.trainer.watches == 1


def test_results_are_acknowledged(doubles: World, policy: Policy) -> None:
    step(policy, ROW)
    step(policy, ROW)
    acknowledged = [header.acked_seq for header in state(doubles, policy).headers]
    assert acknowledged == sorted(acknowledged)
    assert acknowledged[3] == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["ForwardBackward", "OptimStep", "PublishWeights"])
def test_a_lost_answer_changes_nothing(doubles: World, policy: Policy, when: str, method: str) -> None:
    """B93: the reply is dropped, the same request comes again, the policy has stepped once."""
    lost: list[str] = []

    async def lose(name: str, header: Any, context: Any) -> bool:
        if name == method and name not in lost:
            lost.append(name)
            await abort(context, Reason.DRAINING, "bye")
        return True

    setattr(doubles.trainer, when, lose)
    step(policy, ROW, OTHER)
    disturbed = state(doubles, policy)
    assert lost == [method]
    setattr(doubles.trainer, when, None)
    other = doubles.cluster.create_policy("tiny", tuning=ot.LoRA(rank=4), seed=7).result()
    step(other, ROW, OTHER)
    assert disturbed.weights == state(doubles, other).weights
    assert (disturbed.step, disturbed.version) == (1, 1)


def test_a_new_attempt_is_looked_up_and_the_rest_sent_again(doubles: World, policy: Policy) -> None:
    step(policy, ROW)

    async def restart() -> None:
        await doubles.stop()
        doubles.trainer.attempt = doubles.scheduler.attempt = 2
        doubles.scheduler.starting = 2
        await doubles.start()

    gradient = policy.forward_backward([ROW], ot.PPO())
    doubles.portal.run(restart())
    update = policy.optim_step(ot.AdamW())
    assert gradient.result().trained_tokens == 2
    assert update.result().step == 2
    assert state(doubles, policy).headers[-1].attempt == 2


def test_two_halves_are_one_whole(doubles: World, policy: Policy) -> None:
    """B94: gradients accumulate until the step that names them; its denominator is that of all of them."""
    first, second = policy.forward_backward([ROW], ot.PPO()), policy.forward_backward([OTHER], ot.PPO())
    assert policy.optim_step(ot.AdamW()).result().step == 1
    assert (first.seq, second.seq) == (1, 2)
    whole = doubles.trainer.policies[policy.name].log[2][1]
    from opentinkerapi.trainer.v1.trainer_service_pb2 import OptimStepRequest

    request = OptimStepRequest.FromString(whole)
    assert list(request.forward_backward_seqs) == [1, 2]
    assert {part.component: part.denominator for part in request.denominators} == {"policy": 3.0}


def test_a_refused_submission_consumes_no_seq(doubles: World, policy: Policy) -> None:
    async def refuse(name: str, header: Any, context: Any) -> bool:
        if header.seq == 1 and name == "ForwardBackward" and not doubles.trainer.calls.count("Forward"):
            await abort(context, Reason.INVALID_SAMPLE, "sample 0 is bad", index="0")
        return True

    doubles.trainer.before = refuse
    refused = policy.forward_backward([ROW], ot.PPO())
    pipelined = policy.optim_step(ot.AdamW())
    with pytest.raises(errors.InvalidSample):
        refused.result()
    with pytest.raises(errors.IncompleteBatch) as caught:
        pipelined.result()
    assert isinstance(caught.value.__cause__, errors.InvalidSample)
    doubles.trainer.before = None
    step(policy, ROW)
    assert [seq for _, _, seq in [(0, 0, entry[2].seq) for entry in state(doubles, policy).log]] == [1, 2, 3]


def test_a_failed_operation_stops_the_step_that_covers_it(doubles: World, policy: Policy) -> None:
    doubles.trainer.fail_seqs[2] = StatusData(grpc.StatusCode.ABORTED, "it crashed twice", Reason.POISONED)
    good = policy.forward_backward([ROW], ot.PPO())
    bad = policy.forward_backward([OTHER], ot.PPO())
    update = policy.optim_step(ot.AdamW())
    with pytest.raises(errors.IncompleteBatch) as caught:
        update.result()
    assert isinstance(caught.value.__cause__, errors.Poisoned)
    assert good.result().trained_tokens == 2
    assert bad.error is not None
    # The gradient that stands is covered by the next step.
    assert policy.optim_step(ot.AdamW()).result().step == 1


def test_a_step_needs_a_gradient(policy: Policy) -> None:
    with pytest.raises(errors.IncompleteBatch, match="no forward_backward"):
        policy.optim_step(ot.AdamW()).result()


def test_bad_samples_are_refused_here_by_index(policy: Policy) -> None:
    nan = TrainSample([1, 2], [0, 1], logprobs=[0, float("nan")], advantages=[0, 1])
    short = TrainSample([1, 2, 3], [0, 1], logprobs=[0, 0, 0], advantages=[0, 1, 0])
    first = TrainSample([1, 2], [1, 1], logprobs=[0, 0], advantages=[0, 1])
    bare = TrainSample([1, 2], [0, 1])
    untrained = TrainSample([1, 2], [0, 0], logprobs=[0, 0], advantages=[0, 0])
    for rows, said in [
        ([ROW, nan], "sample 1: logprobs is not finite"),
        ([short], "loss_mask has 2 entries for 3 tokens"),
        ([first], r"loss_mask\[0\] is 1"),
        ([bare], "logprobs is missing"),
        ([untrained], "no token to train on"),
    ]:
        with pytest.raises(errors.InvalidSample, match=said):
            policy.forward_backward(rows, ot.PPO())
    assert policy.forward_backward([bare], ot.CrossEntropy()).result().trained_tokens == 1


def test_large_batches_travel_in_chunks(doubles: World, policy: Policy) -> None:
    count = 30_000
    row = TrainSample(list(range(count)), [0] + [1] * (count - 1), [0.0] * count, [1.0] * count)
    assert policy.forward_backward([row] * 9, ot.PPO()).result().trained_tokens == 9 * (count - 1)


def test_await_works_on_any_loop_and_cancelling_leaves_the_operation(doubles: World, policy: Policy) -> None:
    async def use() -> int:
        doubles.trainer.held.clear()
        gradient = policy.forward_backward([ROW], ot.PPO())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(gradient, 0.1)
        doubles.portal.call(doubles.trainer.held.set)
        return (await gradient).trained_tokens

    assert asyncio.run(use()) == 2


def test_an_ended_job_reaches_everyone_who_waits(doubles: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.connection import jobs
    from opentinkerapi.scheduler.v1 import job_pb2

    monkeypatch.setattr(jobs, "RENEW_EVERY_S", 0.1)
    policy = doubles.cluster.create_policy("tiny").result()
    doubles.trainer.held.clear()
    gradient = policy.forward_backward([ROW], ot.PPO())
    doubles.scheduler.jobs[policy.job.name].state = job_pb2.JOB_STATE_CANCELLED
    with pytest.raises(errors.JobEnded, match="cancelled"):
        gradient.result()
    with pytest.raises(errors.JobEnded):
        policy.publish().result()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("ppo", "none of ImportanceSampling"),
        ({}, "at least one loss"),
        (ot.PPO, "none of ImportanceSampling"),
    ],
)
def test_unknown_losses_are_refused(policy: Policy, loss: Any, said: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        policy.forward_backward([ROW], loss)


def test_options_of_losses_and_optimizer_are_checked() -> None:
    for make, said in [
        (lambda: ot.PPO(clip_low=1.5), "clip_low"),
        (lambda: ot.PPO(dual_clip=0.5), "dual_clip"),
        (lambda: ot.AdamW(lr=float("nan")), "lr"),
        (lambda: ot.AdamW(clip_norm=0), "clip_norm"),
        (lambda: ot.LoRA(rank=0), "rank"),
        (lambda: ot.SamplingParams(top_p=0), "top_p"),
    ]:
        with pytest.raises(errors.InvalidArgument, match=said):
            make()
