"""`fit()` on the real embedded stack: every service a process, transformers engine, tiny model, float32."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import opentinker as ot
from opentinker import errors
from opentinker.training.samples import TrainSample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)


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


def fit(cluster: ot.Cluster, model: Path, run_dir: Path) -> ot.FitResult:
    return ot.fit(
        env="guess_number",
        env_options={"low": 0, "high": 4},
        model=str(model),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=3,
        steps=3,
        learning_rate=1e-3,
        sampling=ot.SamplingParams(max_tokens=6),
        evaluation=ot.Evaluation(tasks=4),
        checkpoint_every=2,
        seed=11,
        run_dir=run_dir,
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )


def test_a_hosted_environment_of_several_turns(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    first = fit(cluster, tiny_model_dir, tmp_path / "a")
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    learned = [row for row in steps if not row["training/skipped"]]
    assert first.steps == len(learned) == first.version > 0
    for row in learned:
        # Trainer and sampler agree, both float32.
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4
        assert abs(row["actor/ppo_kl"]) < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["timing_s/engine_gen"] > 0
        assert row["timing_s/engine_update_actor"] > 0
    assert max(row["num_turns/max"] for row in steps) > 1
    assert first.checkpoint is not None
    again = fit(cluster, tiny_model_dir, tmp_path / "b")
    assert again.policy.published.sha256 == first.policy.published.sha256
    assert again.rewards == first.rewards


def test_what_is_published_is_what_is_sampled(policy: ot.Policy) -> None:
    """Scores of the sampler move with the weights and equal the trainer's."""
    prompt = [72, 105, 33, 72, 105]
    row = TrainSample(prompt, [0, 1, 1, 1, 1])
    before = policy.score([prompt]).result()[0]
    for _ in range(3):
        policy.forward_backward([row], ot.CrossEntropy())
        policy.optim_step(ot.AdamW(lr=1e-2))
    version = policy.publish().result()
    trained = policy.forward([row]).result().logprobs[0]
    after = policy.score([prompt]).result()[0]
    assert trained is not None
    np.testing.assert_allclose(after[1:], trained[1:], atol=1e-4)
    assert after[1:].sum() > before[1:].sum() + 0.1
    old = policy.score([prompt], version=version.version - 1).result()[0]
    np.testing.assert_allclose(old[1:], before[1:], atol=1e-4)


def test_sampling_is_a_function_of_the_seed(policy: ot.Policy) -> None:
    params = ot.SamplingParams(max_tokens=8)
    first = policy.sample([65, 66, 67], params, n=5, seed=3).result()
    second = policy.sample([65, 66, 67], params, n=2, seed=4).result()
    assert [completion.token_ids for completion in first[1:3]] == [each.token_ids for each in second]
    np.testing.assert_array_equal(first[1].logprobs, second[0].logprobs)


def test_checkpoint_and_restore(policy: ot.Policy) -> None:
    row = TrainSample([80, 81, 82], [0, 1, 1])
    saved = policy.save_checkpoint("before").result()
    known = policy.forward([row]).result().logprobs[0]
    policy.forward_backward([row], ot.CrossEntropy())
    policy.optim_step(ot.AdamW(lr=1e-2)).result()
    assert not np.array_equal(policy.forward([row]).result().logprobs[0], known)
    policy.restore(saved).result()
    np.testing.assert_array_equal(policy.forward([row]).result().logprobs[0], known)


def test_large_samples_travel_by_blob(policy: ot.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.training import requests

    monkeypatch.setattr(requests, "INLINE_MAX_BYTES", 10_000)
    row = TrainSample([1 + i % 200 for i in range(900)], [0] + [1] * 899)
    inline = policy.forward([row]).result().logprobs[0]
    both = policy.forward([row, row]).result().logprobs
    np.testing.assert_allclose(both[1], inline, atol=1e-5)


def test_bad_requests_are_typed(cluster: ot.Cluster, policy: ot.Policy) -> None:
    with pytest.raises(errors.Unauthenticated):
        ot.connect(cluster.address, key="wrong")
    with pytest.raises(errors.UnknownModel, match="smollm2-135m-instruct"):
        cluster.create_policy("no-such-model").result()
    with pytest.raises(errors.UnknownEnvironment, match="guess_number"):
        ot.run(policy, "chess", episodes=1)
    with pytest.raises(errors.PromptTooLong, match="1024"):
        policy.sample([65] * 2000).result()
    with pytest.raises(errors.NotFound):
        policy.sample([65], version=999).result()
