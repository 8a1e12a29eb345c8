"""Environments that own the model loop on the real embedded stack: trained, evaluated, hosted, served."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import opentinker as ot
from opentinker import errors
from tests.e2e.loop_agents import Chatty

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TRAINER = ot.ServerOptions(engine="torch", dtype="float32", context_tokens=1024)
INFERENCE = ot.ServerOptions(engine="transformers", dtype="float32", context_tokens=1024)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ot.Cluster]:
    entry = {"target": "loop_agents:Chatty", "path": [str(HERE)]}
    settings = {"env_host": {"environments": {"chatty": entry}}}
    with ot.connect(state_dir=tmp_path_factory.mktemp("stack"), settings=settings) as opened:
        yield opened


def test_an_agent_is_trained_by_fit_evaluated_and_served(
    cluster: ot.Cluster, tiny_model_dir: Path, tmp_path: Path
) -> None:
    result = ot.fit(
        env=Chatty,
        model=str(tiny_model_dir),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=2,
        steps=2,
        learning_rate=1e-3,
        evaluation=ot.Evaluation(tasks=2),
        seed=5,
        run_dir=tmp_path / "run",
        trainer=TRAINER,
        inference=INFERENCE,
        progress=False,
        cluster=cluster,
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "critic/score/mean" in row]
    learned = [row for row in steps if not row["training/skipped"]]
    assert len(steps) == 2
    assert result.version == len(learned) > 0
    for row in learned:
        # What the gateway recorded is what the trainer computes.
        assert row["rollout_corr/logprob_abs_diff"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["num_turns/max"] == 2
        assert row["env/agents/mean"] == 1.0
    # The same class in process and hosted, twice: seeds of a run decide what is said.
    held_out = [
        ot.evaluate(result.policy, env, samples=2, tasks=2, seed=3, limits=ot.Limits(turns=2))
        for env in (Chatty, "chatty", Chatty)
    ]
    assert [each.excluded for each in held_out] == [0, 0, 0]
    texts = [[turn.text for each in group for turn in each.turns] for group in map(trajectories, held_out)]
    assert texts[0] == texts[1] == texts[2]
    assert held_out[0].reward == held_out[1].reward == held_out[2].reward
    (group, *_) = held_out[1].groups
    assert {version for each in group.trajectories for row in each.segments for *_, version in row.spans} == {
        result.version
    }
    # And against a served policy: an endpoint is an endpoint.
    deployment = result.policy.deploy("chatty").result()
    endpoint = ot.Endpoint(deployment.url, cluster.api_key, "chatty")
    reward = asyncio.run(Chatty().run(endpoint=endpoint, seed=0, task={"about": "it"}))
    assert 0.0 <= reward <= 1.0
    deployment.delete().result()


def trajectories(result: ot.EvaluationResult) -> list[ot.Trajectory]:
    return [each for group in result.groups for each in group.trajectories]


def test_rollouts_record_what_was_sampled_and_limits_hold(cluster: ot.Cluster, tiny_model_dir: Path) -> None:
    policy = cluster.create_policy(
        str(tiny_model_dir), tuning=ot.LoRA(rank=4), seed=3, trainer=TRAINER, inference=INFERENCE
    ).result()

    async def batch(env: object, **options: object) -> ot.Batch:
        async for each in ot.rollouts(policy, env, groups=1, group_size=3, **options):  # type: ignore[arg-type]
            return each
        raise AssertionError("rollouts have no end")

    params = ot.SamplingParams(temperature=0.7, top_k=20)
    played = asyncio.run(batch("chatty", params=params))
    samples = ot.train_samples(played)
    assert samples.loss_tokens == sum(each.sampled_tokens for each in played) > 0
    assert {each.temperature for each in played} == {0.7}
    scored = policy.forward(samples).result()
    for row, logprobs in zip(samples, scored.logprobs, strict=True):
        assert logprobs is not None
        mask = np.asarray(row.loss_mask, dtype=bool)
        np.testing.assert_allclose(np.asarray(row.logprobs)[mask], logprobs[mask], atol=1e-4)
    cut = asyncio.run(batch(Chatty, limits=ot.Limits(turns=1)))
    assert {(each.end_reason, len(each.turns)) for each in cut} == {(ot.EndReason.TURN_LIMIT, 1)}
    for limits in (ot.Limits(tool_calls=3), ot.Limits(illegal_actions=3)):
        with pytest.raises(errors.InvalidArgument, match="owns the model loop"):
            asyncio.run(batch(Chatty, limits=limits))
    with pytest.raises(errors.UnsupportedOption, match="ignore_eos"):
        asyncio.run(batch(Chatty, params=ot.SamplingParams(ignore_eos=True)))
