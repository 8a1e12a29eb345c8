"""From training to serving on the real embedded stack: a policy that `fit()` trained is served under a name
when its client has gone, and again after the whole stack was stopped. Transformers engine, tiny model.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import opentinker as ot
from opentinker.cli.app import app
from opentinkerapi.scheduler.v1 import job_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

GREEDY = ot.SamplingParams(temperature=0.0, max_tokens=12)
TALK = [{"role": "user", "content": "A number from 0 to 4?"}]


def fit(cluster: ot.Cluster, model: Path, run_dir: Path) -> ot.FitResult:
    options = {"dtype": "float32", "context_tokens": 512}
    return ot.fit(
        env="guess_number",
        env_options={"low": 0, "high": 4},
        model=str(model),
        tuning=ot.LoRA(rank=4),
        algorithm=ot.GRPO(group_size=4),
        groups_per_step=3,
        steps=2,
        learning_rate=0.01,
        sampling=ot.SamplingParams(max_tokens=6),
        checkpoint_every=1,
        seed=11,
        run_dir=run_dir,
        trainer=ot.ServerOptions(engine="torch", **options),
        inference=ot.ServerOptions(engine="transformers", **options),
        progress=False,
        cluster=cluster,
    )


def test_a_policy_is_served_when_who_trained_it_has_gone(tiny_model_dir: Path, tmp_path: Path) -> None:
    stack = tmp_path / "stack"
    with ot.connect(state_dir=stack) as cluster:
        with ot.connect(state_dir=stack) as other:
            result = fit(other, tiny_model_dir, tmp_path / "run")
            policy, version = result.policy.name, result.version
            newest = result.policy.chat(TALK, GREEDY).result()
            first = result.policy.chat(TALK, GREEDY, version=0).result()
            assert version > 0
            assert newest != first, "the versions of this test can be told apart"
        running = {server.name for server in cluster.servers().result()}
        made = cluster.serve(policy, "guesser").result()
        assert (made.model, made.state) == (f"{policy}/versions/{version}", "serving")
        assert {server.name for server in cluster.servers().result()} <= running, "served by what was there"
        assert made.chat(TALK, GREEDY).result() == newest
        assert made.promote(f"{policy}/versions/0").result().chat(TALK, GREEDY).result() == first
        assert result.checkpoint is not None
        made.promote(result.checkpoint).result()
        assert made.model == result.checkpoint.name
        assert result.checkpoint.version == version
        assert made.chat(TALK, GREEDY).result() == newest
        assert cluster.model(policy).chat(TALK, GREEDY).result() == newest
    # The stack is gone with whoever started it. The next one serves again what was deployed.
    with ot.connect(state_dir=stack) as cluster:
        (again,) = ot.deployments(cluster=cluster)
        assert again.wait().result().state == "serving"
        assert again.chat(TALK, GREEDY).result() == newest
        arguments = ["chat", "guesser", "--state-dir", str(stack), "--temperature", "0", "--max-tokens", "12"]
        done = CliRunner().invoke(app, arguments, input=f"{TALK[0]['content']}\n")
        assert done.exit_code == 0, done.output
        assert done.stdout == f"{newest}\n"
        again.roll_back().result()
        assert again.chat(TALK, GREEDY).result() == first
        again.delete().result()
        live = [job for job in cluster.jobs().result() if job.state == job_pb2.JOB_STATE_RUNNING]
        assert not live
