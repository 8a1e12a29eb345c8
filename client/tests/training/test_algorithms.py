"""`fit()` with each algorithm, on doubles: what is scored, what is sent to the trainer and in which order."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.cluster import World
from client.tests.doubles.runs import ALWAYS, EVEN, at_loss, methods, sent, terms, train
from client.tests.doubles.trainer import rows_of, sampled

import opentinker as ot
from opentinker import errors
from opentinkerapi.runtime.tensors import pack_ids, unpack_ids

# --- a reference --------------------------------------------------------------------------------------------


def reference(base: float) -> Any:
    """Trainer double whose base model gives each token the logprob `base`, and the policy -0.5."""

    def score(policy: str, start: Any, sample: Any) -> Any:
        factor = base / -0.5 if start.use_base_model else 1.0
        return factor * sampled(policy, start, sample)

    return score


def test_kl_in_the_loss_is_a_term_with_reference_logprobs(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = reference(-1.0)
    kl = ot.KLPenalty(coefficient=0.05, estimator="k3_straight_through", importance_weighted=True)
    result = train(doubles, tmp_path, ot.GRPO(group_size=4, kl=kl))
    (messages,) = sent(doubles)
    term = terms(messages)["kl"]
    assert (term.coefficient, term.denominator) == (0.05, terms(messages)["policy"].denominator)
    assert term.kl.importance_weighted
    for sample in rows_of(messages):
        assert set(at_loss(sample, "reference_logprobs")) == {-1.0}
        assert set(at_loss(sample, "behavior_logprobs")) == {-0.5}
    row = result.metrics[0]
    # The estimate of d = 0.5, before the update.
    assert row["actor/reference_kl"] == pytest.approx(np.exp(-0.5) - 0.5, abs=1e-6)
    assert row["actor/kl_coef"] == 0.05


def test_a_constant_batch_still_moves_towards_the_reference(doubles: World, tmp_path: Path) -> None:
    """B15: with beta > 0 and advantages 0 the policy moves; and B47: it does not go on for ever."""
    algorithm = ot.GRPO(group_size=4, kl=ot.KLPenalty(coefficient=1.0))
    result = train(doubles, tmp_path, algorithm, env=ALWAYS, steps=50, stop_after_constant=3)
    assert result.steps == 3
    assert "3 steps in a row" in result.stopped
    plain = train(doubles, tmp_path, ot.GRPO(group_size=4), env=ALWAYS, steps=50, stop_after_constant=3)
    assert plain.steps == 0
    bonus = ot.GRPO(group_size=4, entropy_coefficient=0.01)
    assert train(doubles, tmp_path, bonus, env=ALWAYS, steps=50, stop_after_constant=3).steps == 3


def test_kl_in_the_reward_changes_advantages(doubles: World, tmp_path: Path) -> None:
    """Two episodes of one group with equal rewards: the one further from the reference gets less."""

    def score(policy: str, start: Any, sample: Any) -> Any:
        stray = 0.5 + 0.25 * (int(sample.sample_id.split("/")[-2]) % 2)
        return -(stray if start.use_base_model else 0.5) * np.frombuffer(sample.loss_mask, np.uint8)

    doubles.trainer.score = score
    kl = ot.KLPenalty("reward", coefficient=0.1)
    result = train(doubles, tmp_path, ot.GRPO(group_size=2, kl=kl, advantage="dr_grpo"), env=ALWAYS)
    (messages,) = sent(doubles)
    assert set(terms(messages)) == {"policy"}
    for sample in rows_of(messages):
        member = int(sample.sample_id.split("/")[-2])
        (advantage,) = set(at_loss(sample, "advantages"))
        assert (advantage > 0) == (member % 2 == 0)
    assert result.metrics[0]["critic/rewards/max"] == pytest.approx(1.0)
    assert result.metrics[0]["critic/score/min"] == 1.0


def test_kl_in_the_advantage_is_centred(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = reference(-1.0)
    kl = ot.KLPenalty("advantage", coefficient=10.0)
    train(doubles, tmp_path, ot.GRPO(group_size=4, kl=kl))
    plain = ot.GRPO(group_size=4)
    train(doubles, tmp_path, plain)
    with_kl, without = (
        [at_loss(sample, "advantages") for sample in rows_of(messages)] for messages in sent(doubles)
    )
    # Every token is equally far from the reference: nothing to choose between them.
    for one, other in zip(with_kl, without, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_adaptive_coefficient_follows_the_divergence(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = reference(-1.0)
    controller = ot.AdaptiveKL(0.1, target=0.01, horizon=80)
    algorithm = ot.GRPO(group_size=4, kl=ot.KLPenalty(coefficient=controller))
    first = train(doubles, tmp_path, algorithm, steps=3, checkpoint_every=3)
    coefficients = [row["actor/kl_coef"] for row in first.metrics]
    # Far above the target: +20 % * 8 samples / horizon a step, for the next step.
    np.testing.assert_allclose(coefficients, [0.1, 0.1 * 1.02, 0.1 * 1.02**2])
    assert [terms(messages)["kl"].coefficient for messages in sent(doubles)] == coefficients
    state = json.loads(doubles.scheduler.loop_states[-1].state)
    assert state["kl_coefficient"] == pytest.approx(0.1 * 1.02**3)
    # Settings are not used up.
    again = train(doubles, tmp_path, algorithm, steps=1)
    assert again.metrics[0]["actor/kl_coef"] == 0.1


def test_a_frozen_policy_can_be_the_reference(doubles: World, tmp_path: Path) -> None:
    frozen = doubles.cluster.create_policy("tiny").result()
    doubles.trainer.score = lambda name, start, sample: (
        (2.0 if name == frozen.name else 1.0) * sampled(name, start, sample)
    )
    result = train(doubles, tmp_path, ot.GRPO(group_size=4, kl=ot.KLPenalty(reference=frozen)))
    assert methods(doubles, frozen.name) == ["Forward"]
    (start, *_) = sent(doubles, "Forward", frozen.name)[0]
    assert not start.use_base_model
    assert set(at_loss(rows_of(sent(doubles)[0])[0], "reference_logprobs")) == {-1.0}
    config = json.loads(doubles.scheduler.runs[result.run].config_json)
    assert config["algorithm"]["kl"]["reference"] == frozen.name


# --- several steps on a batch -------------------------------------------------------------------------------


def test_epochs_and_mini_batches(doubles: World, tmp_path: Path) -> None:
    """B23: every ratio is taken to the trainer's logprobs from before the first step, never to itself."""
    algorithm = ot.GRPO(group_size=4, epochs=2, mini_batches=3, advantage="dr_grpo")
    result = train(doubles, tmp_path, algorithm, steps=2, stop_after_constant=9)
    of_a_step = ["Forward", *["ForwardBackward", "OptimStep"] * 6, "PublishWeights"]
    assert methods(doubles) == of_a_step * 2
    first = sent(doubles)[:6]
    everything = sorted(sample.sample_id for sample in rows_of(sent(doubles, "Forward")[0]))
    for epoch in (first[:3], first[3:]):
        assert sorted(sample.sample_id for part in epoch for sample in rows_of(part)) == everything
    assert [len(rows_of(part)) for part in first] == [3, 3, 2, 3, 3, 2]
    orders = [
        [sample.sample_id for part in epoch for sample in rows_of(part)] for epoch in (first[:3], first[3:])
    ]
    assert orders[0] != orders[1]
    for messages in first:
        tokens = sum(sample.loss_mask.count(1) for sample in rows_of(messages))
        assert terms(messages)["policy"].denominator == tokens
        for sample in rows_of(messages):
            assert set(at_loss(sample, "proximal_logprobs")) == {-0.5}
    assert result.steps == 12
    assert result.version == 2
    row = result.metrics[0]
    assert (row["actor/updates"], row["training/optimizer_step"]) == (6, 6)
    assert row["tokens/trained"] == 2 * row["tokens/loss"]


def test_the_same_seed_deals_the_same_mini_batches(doubles: World, tmp_path: Path) -> None:
    def order(seed: int) -> list[str]:
        doubles.trainer.ran.clear()
        train(doubles, tmp_path, ot.GRPO(group_size=4, mini_batches=4, loss=ot.CrossEntropy()), seed=seed)
        return [sample.sample_id for messages in sent(doubles) for sample in rows_of(messages)]

    assert order(1) == order(1) != order(2)


def test_mini_batches_that_nothing_can_move_are_left_out(doubles: World, tmp_path: Path) -> None:
    algorithm = ot.GRPO(group_size=4, mini_batches=24)
    result = train(doubles, tmp_path, algorithm, groups_per_step=6)
    parts = sent(doubles)
    assert result.metrics[0]["group/zero_variance_fraction"] > 0
    assert 0 < len(parts) < 24
    for messages in parts:
        assert any(any(at_loss(sample, "advantages")) for sample in rows_of(messages))


def test_metrics_of_several_steps_are_means_of_tokens(doubles: World, tmp_path: Path) -> None:
    """B14: neither the last mini-batch's nor a mean of means."""
    counts = iter([(1.0, 10.0), (9.0, 10.0), (5.0, 80.0)] * 9)

    class Varies(dict[str, Any]):
        def items(self) -> Any:
            return {"actor/ppo_kl": next(counts)}.items()

    doubles.trainer.metrics = Varies()
    result = train(doubles, tmp_path, ot.GRPO(group_size=4, mini_batches=3, loss=ot.CrossEntropy()))
    assert result.metrics[0]["actor/ppo_kl"] == pytest.approx(15 / 100)


@pytest.mark.parametrize(
    ("mode", "denominator"),
    [
        ("token_mean", lambda counts: sum(counts)),
        ("token_sum", lambda counts: 1),
        ("seq_mean_token_sum", len),
        ("seq_mean_token_sum_norm", lambda counts: 12 * len(counts)),
        ("seq_mean_token_mean", len),
    ],
)
def test_aggregation(doubles: World, tmp_path: Path, mode: Any, denominator: Any) -> None:
    """B01: a mean over sequences stays one, however many there are."""
    algorithm = ot.GRPO(group_size=4, aggregation=mode, kl=ot.KLPenalty(), entropy_coefficient=0.1)
    train(doubles, tmp_path, algorithm, sampling=ot.SamplingParams(max_tokens=12))
    (messages,) = sent(doubles)
    counts = [sample.loss_mask.count(1) for sample in rows_of(messages)]
    assert {term.denominator for term in messages[0].losses} == {denominator(counts)}
    for sample, count in zip(rows_of(messages), counts, strict=True):
        if mode == "seq_mean_token_mean":
            np.testing.assert_allclose(at_loss(sample, "weights"), 1 / count, rtol=1e-6)
        else:
            assert not sample.weights


# --- corrections, temperature, support ----------------------------------------------------------------------


def test_corrections_need_the_trainers_logprobs(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.score = lambda name, start, sample: 1.0001 * sampled(name, start, sample)
    for algorithm in (
        ot.GRPO(group_size=4, off_policy_correction=ot.TIS(2.0)),
        ot.GRPO(group_size=4, loss=ot.PPO(correction=ot.TIS(2.0))),
    ):
        doubles.trainer.ran.clear()
        train(doubles, tmp_path, algorithm)
        assert methods(doubles) == ["Forward", "ForwardBackward", "OptimStep", "PublishWeights"]
        (messages,) = sent(doubles)
        assert terms(messages)["policy"].correction.high == 2.0
        assert at_loss(rows_of(messages)[0], "proximal_logprobs")[0] == pytest.approx(-0.50005)


def test_the_sampling_temperature_travels_with_the_rows(doubles: World, tmp_path: Path) -> None:
    """B51: the trainer scales by what the sampler sampled at, in every pass."""
    sampling = ot.SamplingParams(temperature=0.7)
    train(doubles, tmp_path, ot.GRPO(group_size=4, kl=ot.KLPenalty(), epochs=2), sampling=sampling)
    for _, method, messages in doubles.trainer.ran:
        if method.startswith("Forward"):
            assert {round(sample.sampling_temperature, 6) for sample in rows_of(messages)} == {0.7}


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_what_was_kept_travels_with_the_rows(doubles: World, tmp_path: Path, options: Any) -> None:
    """B52: the sampler says what it chose among, and every pass of the trainer gets it, token for token."""
    sampling = ot.SamplingParams(**options)
    algorithm = ot.GRPO(group_size=4, kl=ot.KLPenalty(), epochs=2)
    held_out = ot.Evaluation(tasks=[{"prompt": "Even?"}])
    train(doubles, tmp_path, algorithm, sampling=sampling, evaluation=held_out)
    asked = [request.params for request in doubles.inference.requests]
    assert {params.top_k for params in asked} == {options.get("top_k", 200)}
    # Evaluation samples likewise, but has no use for the sets.
    assert {params.return_support for params in asked} == {True, False}
    passes = [messages for _, method, messages in doubles.trainer.ran if method.startswith("Forward")]
    assert passes
    for sample in (sample for messages in passes for sample in rows_of(messages)):
        trained = np.frombuffer(sample.loss_mask, np.uint8)
        assert unpack_ids(sample.support_sizes) == (2 * trained).tolist()
        ids = np.array(unpack_ids(sample.chunks[0].tokens.token_ids))[trained == 1]
        assert unpack_ids(sample.support_token_ids) == np.stack([ids, ids + 1], 1).reshape(-1).tolist()


def test_rows_without_a_cut_carry_no_sets(doubles: World, tmp_path: Path) -> None:
    train(doubles, tmp_path, ot.GRPO(group_size=4), sampling=ot.SamplingParams(top_p=1.0, top_k=-1))
    assert not any(request.params.return_support for request in doubles.inference.requests)
    (messages,) = sent(doubles)
    assert not any(sample.support_sizes for sample in rows_of(messages))


def test_tokens_chosen_among_more_than_is_listed_leave_their_group(doubles: World, tmp_path: Path) -> None:
    """They cannot be trained on without a bias; that is counted, never silent."""

    def support(ids: list[int]) -> tuple[bytes, bytes]:
        sizes = [-1 if ids[0] % 2 else 1, *[1] * (len(ids) - 1)]
        return pack_ids(sizes), pack_ids([token for token, size in zip(ids, sizes, strict=True) if size > 0])

    doubles.inference.support = support
    result = train(doubles, tmp_path, ot.GRPO(group_size=8), sampling=ot.SamplingParams(top_p=0.9), steps=3)
    excluded = [row["rollout/excluded/SUPPORT_TOO_LARGE"] for row in result.metrics]
    assert sum(excluded) > 0
    for messages in sent(doubles):
        assert all(-1 not in unpack_ids(sample.support_sizes) for sample in rows_of(messages))


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.1}, {"logit_bias": {5: 1.0}}, {"bad_words": ("no",)}],
    ids=str,
)
@pytest.mark.parametrize(
    "algorithm", [ot.GRPO(loss=ot.GSPO()), ot.ActorCritic()], ids=["GSPO", "ActorCritic"]
)
def test_logits_that_are_not_the_models_are_refused(
    doubles: World, tmp_path: Path, algorithm: Any, options: Any
) -> None:
    """B52: the trainer computes other ones, and every ratio would be off."""
    with pytest.raises(errors.UnsupportedOption, match="penalties, bad_words"):
        train(doubles, tmp_path, algorithm, sampling=ot.SamplingParams(**options))
    assert not doubles.scheduler.jobs


# --- estimators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dr_grpo", "rloo", "maxrl", "opo", "gpg", "reinforce_plus_plus", "grpo_per_turn"]
)
def test_estimators_by_name_are_those_of_train_samples(doubles: World, tmp_path: Path, name: str) -> None:
    algorithm = ot.GRPO(group_size=4, advantage=name)
    train(doubles, tmp_path, algorithm)
    (messages,) = sent(doubles)
    policy = doubles.cluster.create_policy("tiny").result()
    rollouts = ot.rollouts(policy, EVEN, groups=2, group_size=4, seed=5)
    batch = doubles.cluster.wait(anext(rollouts))
    function = getattr(ot.advantages, name)
    kept = [row.to_wire().advantages for row in ot.train_samples(batch, function)]
    assert [sample.advantages for sample in rows_of(messages)] == kept


def test_a_function_is_an_estimator(doubles: World, tmp_path: Path) -> None:
    algorithm = ot.GRPO(group_size=4, advantage=lambda rewards, groups: np.full(len(rewards), 2.5))
    train(doubles, tmp_path, algorithm)
    assert {value for sample in rows_of(sent(doubles)[0]) for value in at_loss(sample, "advantages")} == {2.5}


def test_length_is_punished_on_a_line(doubles: World, tmp_path: Path) -> None:
    algorithm = ot.GRPO(group_size=4, overlong=ot.Overlong(2, max_tokens=3), advantage="dr_grpo")
    result = train(doubles, tmp_path, algorithm, env=ALWAYS)
    # Replies of two digits and an end are 3 tokens, of one digit 2.
    assert {result.metrics[0]["critic/rewards/min"], result.metrics[0]["critic/rewards/max"]} <= {0.0, 0.5}
    assert result.metrics[0]["critic/score/mean"] == 1.0


def test_groups_of_one_are_refused_where_they_teach_nothing() -> None:
    """B22: a silent no-op."""
    for name in ("grpo", "dr_grpo", "rloo", "grpo_per_turn"):
        with pytest.raises(errors.InvalidArgument, match="every advantage is 0"):
            ot.GRPO(group_size=1, advantage=name)
    ot.GRPO(group_size=1, singleton="raw")
    ot.GRPO(group_size=1, advantage=partial(ot.advantages.rloo, singleton="raw"))
    ot.GRPO(group_size=1, advantage="reinforce_plus_plus")
    ot.ActorCritic(group_size=1)
