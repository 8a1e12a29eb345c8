"""Every path of an algorithm on the real stack: transformers engine, tiny model, float32, each as short as it
can be.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opentinker as ot

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)
ODD = ot.single_turn(
    [{"prompt": f"Say something ({i})."} for i in range(8)],
    reward=lambda answer, task: float(sum(map(ord, answer)) % 2),
    name="odd",
)
SAMPLING = ot.SamplingParams(max_tokens=5, temperature=0.8)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack")) as opened:
        yield opened


@pytest.fixture(scope="module")
def policy(cluster: ot.Cluster, tiny_model_dir: Path) -> ot.Policy:
    made = cluster.create_policy(
        str(tiny_model_dir), tuning=ot.LoRA(rank=4), seed=1, trainer=TRAINER, inference=INFERENCE
    )
    return made.result()


@pytest.fixture(scope="module")
def start(policy: ot.Policy) -> ot.training.results.Checkpoint:
    return policy.save_checkpoint("start").result()


@pytest.fixture
def rows(policy: ot.Policy, start: Any) -> list[ot.TrainSample]:
    """Sampled rows of two groups with advantages, and the policy as it was made."""
    policy.restore(start).result()
    rollouts = ot.rollouts(policy, ODD, groups=2, group_size=4, params=SAMPLING, seed=3, version=0)
    batch = policy.cluster.wait(anext(rollouts))
    samples = list(ot.train_samples(batch))
    # Whatever was drawn: some credit, of both signs.
    return [
        replace(row, advantages=np.asarray(row.loss_mask, dtype=np.float32) * (-1.0) ** index)
        for index, row in enumerate(samples)
    ]


def tokens(rows: list[ot.TrainSample]) -> float:
    return float(sum(row.loss_tokens for row in rows))


def test_the_first_ratio_is_one_and_later_ones_are_not(policy: ot.Policy, rows: list[ot.TrainSample]) -> None:
    """B56, B23, B51: a Forward before the update gives what the update computes, bit for bit; at temperature
    0.8 trainer and sampler agree; the second step on the batch sees a policy that has moved.
    """
    scored = policy.forward(rows).result()
    rows = [replace(row, proximal_logprobs=own) for row, own in zip(rows, scored.logprobs, strict=True)]
    found = []
    for _ in range(2):
        gradient = policy.forward_backward(
            rows, ot.PPO(clip_low=0.01, clip_high=0.01), denominator=tokens(rows)
        )
        policy.optim_step(ot.AdamW(lr=1e-2))
        found.append({name: value.mean for name, value in gradient.result().metrics.items()})
    first, second = found
    assert first["actor/ppo_kl"] == 0
    assert first["actor/pg_clipfrac"] == 0
    assert first["rollout_corr/logprob_abs_diff"] < 1e-4
    assert abs(second["actor/ppo_kl"]) > 1e-4
    assert second["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 30}, {"min_p": 0.3}], ids=str)
def test_a_ratio_over_what_was_kept_is_one(policy: ot.Policy, start: Any, cut: dict[str, float]) -> None:
    """B52: the sampler lists what it kept, and the trainer's logprobs are over that."""
    policy.restore(start).result()
    params = replace(SAMPLING, **cut)
    rollouts = ot.rollouts(policy, ODD, groups=1, group_size=4, params=params, seed=3, version=0)
    rows = list(ot.train_samples(policy.cluster.wait(anext(rollouts))))
    assert len(rows) == 4

    def gap(rows: list[ot.TrainSample]) -> float:
        scored = policy.forward(rows).result().logprobs
        gaps = [
            np.abs(np.asarray(row.logprobs) - own)[np.asarray(row.loss_mask) == 1]
            for row, own in zip(rows, scored, strict=True)
        ]
        return float(np.max(np.concatenate(gaps)))

    assert gap(rows) < 1e-4
    assert gap([replace(row, support=None) for row in rows]) > 1e-2


def test_fit_trains_on_tokens_that_were_cut_off(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """B52: and its own check of trainer against sampler passes at a tight bound."""
    result = ot.fit(
        ODD,
        str(tiny_model_dir),
        cluster=cluster,
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        sampling=replace(SAMPLING, top_p=0.7),
        groups_per_step=2,
        steps=2,
        seed=3,
        trainer=TRAINER,
        inference=INFERENCE,
        logprob_check=1e-4,
        run_dir=tmp_path,
        progress=False,
    )
    assert result.steps > 0
    assert any("rollout_corr/check_abs_diff" in row for row in result.metrics)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_straight_through"])
def test_a_kl_term_pulls_back_to_the_reference(
    policy: ot.Policy, rows: list[ot.TrainSample], estimator: Any
) -> None:
    """B15, B24: no advantage at all, and the divergence from the base falls, on its own tokens."""
    for _ in range(4):
        policy.forward_backward(rows, ot.CrossEntropy())
        policy.optim_step(ot.AdamW(lr=1e-2))
    base = policy.forward(rows, base_model=True).result().logprobs
    held = [
        replace(row, reference_logprobs=own, advantages=np.zeros(len(row.token_ids)))
        for row, own in zip(rows, base, strict=True)
    ]
    losses = {"policy": ot.PPO(), "kl": ot.Component(ot.KL(estimator), coefficient=1.0)}
    values = []
    for _ in range(12):
        gradient = policy.forward_backward(held, losses, denominator=tokens(held), skip_inert=True)
        policy.optim_step(ot.AdamW(lr=3e-3))
        values.append(gradient.result().metrics["actor/kl_loss"].mean)
    assert values[0] > 1e-3
    assert values[-1] < 0.5 * values[0]


def test_a_custom_loss_is_the_trainers_own(policy: ot.Policy, start: Any, rows: list[ot.TrainSample]) -> None:
    """Clipped PPO by a function of one's own, against the trainer's: the same step."""
    # Some tokens beyond the clip on either side, some within.
    shifts = [0.1 * np.cos(np.arange(len(row.token_ids))) for row in rows]
    old = [np.asarray(row.logprobs) + shift for row, shift in zip(rows, shifts, strict=True)]
    rows = [replace(row, proximal_logprobs=own) for row, own in zip(rows, old, strict=True)]

    def ppo(logprobs: list[np.ndarray[Any, Any]]) -> tuple[float, list[Any]]:
        loss, gradients = 0.0, []
        for own, row, before in zip(logprobs, rows, old, strict=True):
            mask, advantage = np.asarray(row.loss_mask), np.asarray(row.advantages)
            ratio = np.exp(own - before)
            plain, clipped = -ratio * advantage, -np.clip(ratio, 0.95, 1.05) * advantage
            loss += float((mask * np.maximum(plain, clipped)).sum()) / tokens(rows)
            gradients.append(mask * np.where(plain >= clipped, plain, 0.0) / tokens(rows))
        return loss, gradients

    def after(step: Any) -> tuple[float, float, list[Any]]:
        policy.restore(start).result()
        loss = step()
        norm = policy.optim_step(ot.AdamW(lr=1e-2)).result().grad_norm
        return loss, norm, list(policy.forward(rows).result().logprobs)

    own = after(lambda: policy.forward_backward_custom(rows, ppo).result().loss)
    native = after(
        lambda: (
            policy.forward_backward(rows, ot.PPO(0.05, 0.05), denominator=tokens(rows))
            .result()
            .metrics["actor/pg_loss"]
            .mean
        )
    )
    assert own[0] == pytest.approx(native[0], abs=1e-5)
    assert own[1] == pytest.approx(native[1], rel=1e-4)
    assert own[1] > 0
    for one, other in zip(own[2], native[2], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_critic_learns_what_it_is_told(policy: ot.Policy, rows: list[ot.TrainSample]) -> None:
    """A second policy of the same job: its values come nearer to the returns, the policy stays as it is."""
    before = policy.forward(rows).result().logprobs
    critic = policy.cluster.create_policy(
        policy.base_model, tuning=ot.LoRA(rank=4, value_head=True), beside=policy
    ).result()
    values = critic.forward(rows, values=True).result().values
    told = [
        replace(row, returns=np.full(len(row.token_ids), 0.8), old_values=known)
        for row, known in zip(rows, values, strict=True)
    ]
    losses = []
    for _ in range(15):
        gradient = critic.forward_backward(told, ot.Value(clip=5.0), denominator=tokens(told))
        critic.optim_step(ot.AdamW(lr=2e-2))
        losses.append(gradient.result().metrics["critic/vf_loss"].mean)
    expected = np.mean(
        [
            0.5 * (value - 0.8) ** 2
            for row, known in zip(rows, values, strict=True)
            for value in np.asarray(known)[np.asarray(row.loss_mask) == 1]
        ]
    )
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < 0.1 * losses[0]
    for one, other in zip(before, policy.forward(rows).result().logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_components_of_a_batch_keep_to_their_rows(policy: ot.Policy, rows: list[ot.TrainSample]) -> None:
    """Policy, labelled and teacher's rows in one step: each sum is that of its rows alone."""
    half = len(rows) // 2
    teacher = policy.forward(rows, base_model=True).result().logprobs
    mixed = [
        replace(row, components=("policy",))
        if index < half
        else replace(row, components=("labels", "teacher"), teacher_logprobs=np.asarray(known) - 0.3)
        for index, (row, known) in enumerate(zip(rows, teacher, strict=True))
    ]
    losses = {"policy": ot.PPO(), "labels": ot.CrossEntropy(), "teacher": ot.Distillation()}
    together = policy.forward_backward(mixed, losses).result().components
    alone = policy.forward_backward(rows[:half], ot.PPO()).result().components
    labels = policy.forward_backward(
        [replace(row, components=()) for row in mixed[half:]],
        {"labels": ot.CrossEntropy(), "teacher": ot.Distillation()},
    ).result()
    policy.optim_step(ot.AdamW()).result()
    assert together["policy"].sum == pytest.approx(alone["policy"].sum, abs=1e-4)
    assert together["policy"].weight == tokens(rows[:half])
    for name in ("labels", "teacher"):
        assert together[name].sum == pytest.approx(labels.components[name].sum, abs=1e-4)
        assert together[name].weight == tokens(rows[half:])


ALGORITHMS = {
    "kl-epochs-correction": ot.GRPO(
        group_size=4,
        loss=ot.GSPO(),
        kl=ot.KLPenalty("reward", coefficient=0.05),
        entropy_coefficient=0.01,
        off_policy_correction=ot.TIS(2.0),
        aggregation="seq_mean_token_mean",
        epochs=2,
        mini_batches=2,
    ),
    "critic": ot.ActorCritic(group_size=2, critic=ot.Critic(learning_rate=1e-2), kl=ot.KLPenalty()),
    "shared-critic": ot.ActorCritic(group_size=2, critic=ot.Critic(shared=True), epochs=2),
    "full": ot.ActorCritic(group_size=2, kl=ot.KLPenalty()),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_fit_with(cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path, name: str) -> None:
    result = ot.fit(
        ODD,
        str(tiny_model_dir),
        tuning=ot.Full() if name == "full" else ot.LoRA(rank=4),
        algorithm=ALGORITHMS[name],
        groups_per_step=3,
        steps=3,
        learning_rate=1e-3,
        sampling=SAMPLING,
        checkpoint_every=3,
        seed=2,
        run_dir=tmp_path,
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    learned = [row for row in result.metrics if not row["training/skipped"]]
    assert learned
    first = learned[0]
    assert first["rollout_corr/check_abs_diff"] < first["rollout_corr/check_bound"] == 1e-3
    for row in learned:
        assert all(np.isfinite(value) for value in row.values())
        assert row["actor/grad_norm"] > 0
        assert row["rollout_corr/logprob_abs_diff"] < 1e-3
    if name == "kl-epochs-correction":
        assert result.steps == sum(int(row["actor/updates"]) for row in learned)
        assert abs(first["actor/reference_kl"]) < 1e-3
        assert abs(learned[-1]["rollout_corr/weight"] - 1) < 0.01
        return
    assert all(row["critic/vf_loss"] > 0 for row in learned)
    assert learned[-1]["critic/values/mean"] != learned[0]["critic/values/mean"]
    if name == "full":
        # The reference is the model as it was loaded, from which the policy moves away.
        assert abs(first["actor/reference_kl"]) < 1e-6 < abs(learned[-1]["actor/reference_kl"])
    if name in ("critic", "full"):
        assert result.critic is not None
        assert result.critic.checkpoint is not None
        assert learned[0]["critic/grad_norm"] > 0


def test_from_supervised_to_reinforcement_learning(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A run starts from the weights of a supervised one, its critic too; the supervised policy is the
    reference in the KL term: nothing is between them at first, and something after a step.
    """
    turns = [("user", "Say something."), ("assistant", "Something else.")]
    warm = ot.sft(
        [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 4,
        str(tiny_model_dir),
        tuning=ot.LoRA(rank=4),
        steps=3,
        batch_size=4,
        learning_rate=2e-2,
        checkpoint_every=3,
        run_dir=tmp_path / "sft",
        trainer=TRAINER,
        progress=False,
        cluster=cluster,
    )
    assert warm.losses[-1] < warm.losses[0] - 0.1
    assert warm.checkpoint is not None
    result = ot.fit(
        ODD,
        str(tiny_model_dir),
        tuning=ot.LoRA(rank=4),
        from_checkpoint=warm.checkpoint,
        algorithm=ot.ActorCritic(group_size=2, kl=ot.KLPenalty(reference=warm.policy)),
        groups_per_step=3,
        steps=2,
        learning_rate=2e-2,
        sampling=SAMPLING,
        run_dir=tmp_path / "fit",
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    first, second = result.metrics
    assert result.steps == 2
    assert abs(first["actor/reference_kl"]) < 1e-6
    assert second["actor/reference_kl"] > 1e-4
    assert first["rollout_corr/check_abs_diff"] < 1e-3
