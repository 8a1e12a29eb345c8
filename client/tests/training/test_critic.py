"""`fit()` with a critic, with all weights, from a checkpoint: what is made, scored and sent, on doubles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.runs import at_loss, methods, sent, terms, train
from client.tests.doubles.trainer import rows_of

import opentinker as ot
from opentinkerapi.catalog.v1 import policy_pb2
from opentinkerapi.scheduler.v1 import job_pb2


def test_a_critic_of_its_own(doubles: World, tmp_path: Path) -> None:
    """A second policy of the same job: values before the update, its own loss, steps and learning rate."""
    critic = ot.Critic(clip=0.3, learning_rate=lambda step: 0.5 / step, tuning=ot.LoRA(rank=2), warmup=1)
    algorithm = ot.ActorCritic(critic=critic, group_size=1, gamma=0.9, gae_lambda=0.8)
    result = train(
        doubles, tmp_path, algorithm, groups_per_step=6, steps=2, learning_rate=1e-3, checkpoint_every=2
    )
    assert result.critic is not None
    actor, valued = result.policy.name, result.critic.name
    assert len(doubles.scheduler.jobs) == 1
    assert methods(doubles, valued) == [*["Forward", "ForwardBackward", "OptimStep"] * 2, "SaveCheckpoint"]
    # In the warmup the policy only is compared with its sampler.
    assert methods(doubles, actor) == [
        "Forward",
        "ForwardBackward",
        "OptimStep",
        "PublishWeights",
        "SaveCheckpoint",
    ]
    assert result.steps == 1
    start, *_ = sent(doubles, "Forward", valued)[0]
    assert start.return_values
    for messages in sent(doubles, policy=valued):
        assert {name: term.WhichOneof("loss") for name, term in terms(messages).items()} == {"value": "value"}
        assert terms(messages)["value"].value.clip == 0.3
        for sample in rows_of(messages):
            assert set(at_loss(sample, "old_values")) == {0.25}
    rates = [step.adamw.learning_rate for (step,) in sent(doubles, "OptimStep", valued)]
    assert rates == [0.5, 0.25]
    (messages,) = sent(doubles, policy=actor)
    assert set(terms(messages)) == {"policy"}
    advantages = np.concatenate([at_loss(sample, "advantages") for sample in rows_of(messages)])
    assert advantages.mean() == pytest.approx(0, abs=1e-6)
    assert advantages.std(ddof=1) == pytest.approx(1, abs=1e-3)
    state = json.loads(doubles.scheduler.loop_states[-1].state)
    assert state["critic_checkpoint"] == result.critic.checkpoint.name  # type: ignore[union-attr]
    row = result.metrics[1]
    assert (row["critic/lr"], row["actor/lr"]) == (0.25, 1e-3)


def test_returns_are_of_the_critics_values(doubles: World, tmp_path: Path) -> None:
    """Against the formula: values 0.25 everywhere, the reward at the last token."""
    algorithm = ot.ActorCritic(group_size=1, gamma=0.9, gae_lambda=0.8, whiten=False)
    result = train(doubles, tmp_path, algorithm, groups_per_step=4)
    (messages,) = sent(doubles, policy=result.policy.name)
    for sample in rows_of(messages):
        got, returns = at_loss(sample, "advantages"), at_loss(sample, "returns")
        reward = returns[-1]
        assert reward in (0.0, 1.0)
        expected = reward - 0.25
        for value, back in list(zip(got, returns, strict=True))[::-1]:
            assert value == pytest.approx(expected, abs=1e-6)
            assert back == pytest.approx(expected + 0.25, abs=1e-6)
            expected = 0.9 * 0.25 - 0.25 + 0.9 * 0.8 * expected


def test_a_shared_critic_is_one_objective(doubles: World, tmp_path: Path) -> None:
    algorithm = ot.ActorCritic(
        critic=ot.Critic(shared=True, coefficient=0.7),
        kl=ot.KLPenalty(coefficient=0.2),
        entropy_coefficient=0.01,
        off_policy_correction=ot.IcePop(),
    )
    created: list[Any] = []
    create = doubles.trainer.CreatePolicy

    async def spy(request: Any, context: Any) -> Any:
        created.append(request)
        return await create(request, context)

    doubles.trainer.CreatePolicy = spy  # type: ignore[method-assign]
    result = train(doubles, tmp_path, algorithm, groups_per_step=4)
    assert result.critic is None
    # One Forward for logprobs and values together, one for the reference.
    assert methods(doubles)[:2] == ["Forward", "Forward"]
    (messages,) = sent(doubles)
    assert {name: term.coefficient or 1.0 for name, term in terms(messages).items()} == {
        "policy": 1.0, "kl": 0.2, "entropy": 0.01, "value": 0.7,
    }  # fmt: skip
    assert [request.tuning.value_head for request in created] in ([True], [])


def test_full_tuning_has_servers_of_its_own(doubles: World, tmp_path: Path) -> None:
    train(doubles, tmp_path, ot.GRPO(group_size=4), tuning=ot.Full(activation_checkpointing=True))
    (job,) = doubles.scheduler.jobs.values()
    assert job.kind == job_pb2.JOB_KIND_FULL_RL
    assert job.slots[0].tuning == job_pb2.TUNING_KIND_FULL
    assert job.slots[0].options.exclusive
    tuning = ot.Full(value_head=True, activation_checkpointing=True).to_wire()
    assert tuning == policy_pb2.Tuning(
        full=policy_pb2.FullTuning(), value_head=True, activation_checkpointing=True
    )


def test_a_run_starts_from_a_checkpoint(doubles: World, tmp_path: Path) -> None:
    """Its weights only: the first batch is sampled from them, and a critic alike in tuning has them too."""
    warm = doubles.cluster.create_policy("tiny").result()
    warm.forward_backward([ot.TrainSample([1, 2], [0, 1])], ot.CrossEntropy())
    warm.optim_step(ot.AdamW())
    saved = warm.save_checkpoint().result()
    doubles.trainer.ran.clear()
    result = train(doubles, tmp_path, ot.ActorCritic(), from_checkpoint=saved, groups_per_step=4)
    assert methods(doubles, result.policy.name)[:2] == ["RestoreCheckpoint", "PublishWeights"]
    assert methods(doubles, result.critic.name)[0] == "RestoreCheckpoint"  # type: ignore[union-attr]
    restored = [messages[0] for messages in sent(doubles, "RestoreCheckpoint")]
    assert {(each.checkpoint, each.weights_only) for each in restored} == {(saved.name, True)}
    assert doubles.inference.requests[0].model.policy_version.version == 1
    assert result.steps == 1
    assert json.loads(doubles.scheduler.runs[result.run].config_json)["from_checkpoint"] == saved.name
