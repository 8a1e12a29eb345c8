"""`fit()` and its neighbours on doubles over real gRPC: the loop, what it records, what it refuses."""

import asyncio
import json
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client.tests.doubles.cluster import World, world
from client.tests.doubles.inference import InferenceDouble
from client.tests.doubles.trainer import abort

import opentinker as ot
from opentinker import errors
from opentinker.environments.builtin import Arithmetic, GuessNumber
from opentinker.loop.result import FitResult
from opentinkerapi.run.v1 import run_pb2
from opentinkerapi.runtime.reasons import Reason

EVEN = ot.single_turn(
    [{"prompt": f"Say an even number ({i})."} for i in range(20)],
    reward=lambda answer, task: float(int(answer) % 2 == 0),
    name="even",
)
ALWAYS = ot.single_turn([{"prompt": "Hello?"}], reward=lambda answer, task: 1.0, name="always")


def train(doubles: World, tmp_path: Path, **options: Any) -> FitResult:
    defaults: dict[str, Any] = {"steps": 3, "groups_per_step": 2, "run_dir": tmp_path / "run", "seed": 5}
    algorithm = options.pop("algorithm", ot.GRPO(group_size=4))
    env = options.pop("env", EVEN)
    return ot.fit(env, "tiny", algorithm=algorithm, **{**defaults, **options})


def test_steps_evaluations_and_checkpoints(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.metrics = {"actor/ppo_kl": (0.5, 10.0), "rollout_corr/logprob_abs_diff": (0.2, 10.0)}
    result = train(
        doubles,
        tmp_path,
        env=Arithmetic,
        evaluation=ot.Evaluation(every=2, samples=2, tasks=5),
        checkpoint_every=2,
        learning_rate=lambda step: 1e-3 / step,
        algorithm=ot.GRPO(group_size=4, zero_variance="keep"),
        stop_after_constant=50,
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in result.evaluations] == [0, 2, 3]
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 3]
    assert rows[0]["val-core/Arithmetic/reward/mean@2"] == result.evaluations[0][1].reward
    assert result.evaluations[0][1].tasks == 5
    assert len(result.metrics) == 3
    recorded = doubles.scheduler.runs[result.run]
    assert recorded.state == run_pb2.RUN_STATE_SUCCEEDED
    assert recorded.job == result.policy.job.name
    assert json.loads(recorded.config_json)["algorithm"]["name"] == "GRPO"
    assert [state.step for state in doubles.scheduler.loop_states] == [2]
    assert json.loads(doubles.scheduler.loop_states[0].state)["next_ordinal"] == 4


def test_a_step_trains_and_publishes(doubles: World, tmp_path: Path) -> None:
    doubles.trainer.metrics = {"actor/ppo_kl": (0.5, 10.0)}
    seen: list[int] = []

    class Watch(ot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            seen.append(step)

    result = train(doubles, tmp_path, callbacks=[Watch()], steps=4)
    assert seen == [1, 2, 3, 4]
    trained = [row for row in result.metrics if not row["training/skipped"]]
    assert result.steps == len(trained) > 0
    assert result.version == doubles.trainer.policies[result.policy.name].version == len(trained)
    row = trained[0]
    for name in (
        "critic/score/mean",
        "critic/advantages/max",
        "actor/ppo_kl",
        "actor/grad_norm",
        "actor/lr",
        "response_length/mean",
        "response/clip_ratio",
        "num_turns/mean",
        "timing_s/gen",
        "timing_s/step",
        "timing_s/engine_gen",
        "timing_s/engine_update_actor",
        "timing_s/engine_update_weights",
        "perf/throughput",
        "group/zero_variance_fraction",
        "tokens/loss",
        "staleness/max",
    ):
        assert name in row, name
    assert row["timing_s/engine_update_actor"] == pytest.approx(0.02)
    assert row["timing_s/engine_update_weights"] == pytest.approx(0.03)
    assert doubles.inference.loaded == list(range(1, len(trained) + 1))


def test_the_whole_batch_is_the_denominator(doubles: World, tmp_path: Path) -> None:
    """Rows that cannot contribute are left out of the computation, not of what the loss is divided by."""
    sent: list[Any] = []
    record = doubles.trainer._run

    def spy(state: Any, method: str, messages: list[Any], done: Any) -> None:
        sent.append((method, messages))
        record(state, method, messages, done)

    doubles.trainer._run = spy  # type: ignore[method-assign]
    result = train(doubles, tmp_path, steps=1)
    assert [method for method, _ in sent] == ["Forward", "ForwardBackward", "OptimStep", "PublishWeights"]
    start, *chunks = sent[1][1]
    rows = [sample for chunk in chunks for sample in chunk.samples]
    assert len(rows) == result.metrics[0]["rows/total"] == 8
    assert start.skip_inert_rows
    assert start.losses[0].denominator == sum(row.loss_mask.count(1) for row in rows)
    assert start.losses[0].ppo.clip_high == 0.2


def test_groups_share_their_first_request_with_consecutive_seeds(doubles: World, tmp_path: Path) -> None:
    train(doubles, tmp_path, steps=2)
    requests = doubles.inference.requests
    assert [request.n for request in requests] == [4] * 4
    assert len({request.request_id for request in requests}) == 4
    assert len({request.params.seed for request in requests}) == 4
    assert set(doubles.inference.acknowledged) <= {request.request_id for request in requests}


def test_later_turns_are_requests_of_their_own(doubles: World, tmp_path: Path) -> None:
    train(doubles, tmp_path, env=GuessNumber, steps=1, groups_per_step=1)
    sizes = [request.n for request in doubles.inference.requests]
    assert sizes[0] == 4
    assert set(sizes[1:]) == {1}
    base = doubles.inference.requests[0].params.seed
    later = [request.params.seed for request in doubles.inference.requests[1:]]
    assert len(set(later)) == len(later)
    assert base not in later


def weights(doubles: World, result: FitResult) -> str:
    return doubles.trainer.policies[result.policy.name].weights


def test_the_same_seed_gives_the_same_weights_whatever_breaks(tmp_path: Path) -> None:
    """A Sample that breaks off after some completions, answers that get lost: the weights come out the
    same.
    """
    lost: set[int] = set()

    async def lose(name: str, header: Any, context: Any) -> bool:
        if header.seq % 2 and header.seq not in lost:
            lost.add(header.seq)
            await abort(context, Reason.DRAINING, "bye")
        return True

    def play(disturbed: bool) -> tuple[str, list[float], int]:
        inference = InferenceDouble()
        inference.fail_after = 2 if disturbed else None
        with world(inference) as doubles:
            doubles.trainer.after = lose if disturbed else None
            result = train(doubles, tmp_path / str(disturbed), steps=4, env=GuessNumber)
            assert bool(inference.broken) == disturbed
            return weights(doubles, result), result.rewards, result.steps

    assert play(False) == play(True)
    assert lost


def test_another_seed_gives_other_weights(doubles: World, tmp_path: Path) -> None:
    first = train(doubles, tmp_path / "a", seed=1)
    second = train(doubles, tmp_path / "b", seed=2)
    third = train(doubles, tmp_path / "c", seed=1)
    assert weights(doubles, first) == weights(doubles, third) != weights(doubles, second)


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
def test_constant_rewards_skip_steps_and_stop_with_a_reason(
    doubles: World, tmp_path: Path, zero_variance: Any
) -> None:
    """B47."""
    algorithm = ot.GRPO(group_size=4, zero_variance=zero_variance)
    result = train(doubles, tmp_path, env=ALWAYS, steps=100, stop_after_constant=3, algorithm=algorithm)
    assert "no group had rewards that differ, 3 steps in a row" in result.stopped
    assert result.steps == 0
    assert [row["training/skipped"] for row in result.metrics] == [1.0] * 3
    assert result.metrics[0]["group/zero_variance_fraction"] == 1.0
    assert not doubles.trainer.policies[result.policy.name].log


def test_endless_replies_are_warned_about(doubles: World, tmp_path: Path) -> None:
    """B48: the metric is named, and so is the limit."""
    doubles.inference.end = False
    with pytest.warns(RuntimeWarning, match=r"response/clip_ratio was 1.00 for 3 steps.*max_tokens=12"):
        train(doubles, tmp_path, steps=4, sampling=ot.SamplingParams(max_tokens=12))


def test_normal_replies_are_not(doubles: World, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(doubles, tmp_path, steps=4)


def test_a_static_data_set_is_shuffled_by_the_seed(doubles: World, tmp_path: Path) -> None:
    def prompts(seed: int) -> list[set[bytes]]:
        doubles.inference.requests.clear()
        train(doubles, tmp_path / str(seed), steps=10, seed=seed)
        sent = [request.prompt.chunks[0].tokens.token_ids for request in doubles.inference.requests]
        # The groups of a step play side by side, in any order.
        return [set(sent[start : start + 2]) for start in range(0, len(sent), 2)]

    first, second, again = prompts(1), prompts(2), prompts(1)
    assert first == again != second
    assert len(set().union(*first)) == 20  # every task once in an epoch


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_staleness", 1),
        ("resume", "auto"),
        ("curriculum", object()),
        ("loggers", ["tensorboard"]),
        ("algorithm", "dr_grpo"),
        ("tuning", "full"),
        ("sampling", ot.SamplingParams(presence_penalty=0.5)),
    ],
)
def test_options_of_later_versions_are_refused_by_name(
    doubles: World, tmp_path: Path, option: str, value: Any
) -> None:
    with pytest.raises(errors.UnsupportedOption, match=option) as caught:
        train(doubles, tmp_path, **{option: value})
    assert caught.value.field == option
    assert not doubles.scheduler.jobs


def test_neutral_values_of_later_options_are_taken(doubles: World, tmp_path: Path) -> None:
    assert train(doubles, tmp_path, steps=1, max_staleness=0, resume=None).metrics


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stepz": 3}, "no option 'stepz'; it has agents, algorithm"),
        ({"steps": 0}, "steps"),
        ({"groups_per_step": -1}, "groups_per_step"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"loggers": ["papyrus"]}, "unknown logger 'papyrus'"),
        ({"loggers": [object()]}, "has no log"),
        ({"callbacks": [print]}, "no opentinker.Callback"),
        ({"sampling": ot.SamplingParams(temperature=0.0)}, "temperature"),
        ({"sampling": ot.SamplingParams(top_k=257)}, "sampling.top_k"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    doubles: World, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidArgument, match=said):
        train(doubles, tmp_path, **options)
    assert not doubles.scheduler.jobs


def test_unknown_models_and_environments(doubles: World, tmp_path: Path) -> None:
    doubles.scheduler.refuse_model = "tiny"
    with pytest.raises(errors.UnknownModel, match="known: smollm2"):
        train(doubles, tmp_path)
    doubles.scheduler.refuse_model = ""
    with pytest.raises(errors.UnknownEnvironment, match="no env_host"):
        train(doubles, tmp_path, env="chess")
    with pytest.raises(TypeError, match="no environment"):
        train(doubles, tmp_path, env=Path)


def test_a_failed_run_is_recorded_as_failed(doubles: World, tmp_path: Path) -> None:
    class Stops(ot.Callback):
        def on_step(self, step: int, metrics: Any) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(doubles, tmp_path, callbacks=[Stops()])
    assert [run.state for run in doubles.scheduler.runs.values()] == [run_pb2.RUN_STATE_FAILED]


@pytest.fixture
def policy(doubles: World) -> ot.Policy:
    return doubles.cluster.create_policy("tiny").result()


def test_run_and_evaluate(policy: ot.Policy) -> None:
    played = ot.run(policy, EVEN, episodes=6, split="train")
    assert played.episodes == len(played.trajectories) == 6
    assert 0 <= played.reward <= 1
    assert played.low <= played.reward <= played.high
    first = ot.evaluate(policy, EVEN, split="train", tasks=4, samples=3)
    second = ot.evaluate(policy, EVEN, split="train", tasks=4, samples=3)
    assert (first.reward, first.tasks, first.samples) == (second.reward, 4, 3)
    with pytest.raises(errors.InvalidArgument, match="episodes"):
        ot.run(policy, EVEN, episodes=0)


def test_b40_a_reward_belongs_to_its_completion(policy: ot.Policy) -> None:
    """Whoever is scored first stays with its own tokens: the earlier an episode, the longer its scoring."""
    places = iter(range(11, -1, -1))
    turn = threading.Condition()
    finished: list[int] = []

    class Slow(ot.Environment):
        max_turns = 1

        def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
            self.place = next(places)
            return ot.Observation("Say a number.")

        def step(self, action: ot.Action) -> ot.StepResult:
            with turn:
                turn.wait_for(lambda: len(finished) == self.place, timeout=20)
                finished.append(self.place)
                turn.notify_all()
            return ot.StepResult(reward=float(action.text), terminated=True)

    async def play() -> ot.Batch:
        async for batch in ot.rollouts(policy, Slow, groups=3, group_size=4):
            return batch
        raise AssertionError

    batch = asyncio.run(play())
    assert finished == sorted(finished)  # in the reverse of the order in which they began
    said = [float(trajectory.turns[0].text) for trajectory in batch]
    assert len(set(said)) > 4
    assert [trajectory.reward.value for trajectory in batch] == said
    tokenizer = policy.tokenizer().result()
    for row in ot.train_samples(batch, advantage=lambda rewards: np.asarray(rewards)):
        assert row.advantages is not None
        own = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
        told = {float(each) for each, mask in zip(row.advantages, row.loss_mask, strict=True) if mask}
        assert told == {float(tokenizer.decode(own[:-1]))}


def test_sampling_from_a_policy(doubles: World, policy: ot.Policy) -> None:
    completions = policy.sample([1, 2, 3], ot.SamplingParams(max_tokens=4), n=3, seed=11).result()
    assert [completion.seed for completion in completions] == [11, 12, 13]
    assert (
        policy.chat("Hello?", seed=3).result()
        == policy.chat([{"role": "user", "content": "Hello?"}], seed=3).result()
    )
    scores = policy.score([[1, 2, 3], [4, 5]]).result()
    assert [len(score) for score in scores] == [3, 2]
    with pytest.raises(errors.InvalidArgument, match="n: must be"):
        policy.sample([1], n=0)


def test_an_engine_that_dies_again_and_again_is_an_error(doubles: World, policy: ot.Policy) -> None:
    """B107: a fault that no retry repairs reaches the user with its cause."""
    doubles.inference.fail_after, doubles.inference.always_fails = 1, True
    with pytest.raises(errors.Unavailable, match="the engine died"):
        policy.sample([1, 2, 3], n=2).result()
    assert len(doubles.inference.requests) == 4


def test_the_loop_of_a_user(doubles: World, policy: ot.Policy) -> None:
    """The loop of the README, on a loop that is not the client's."""

    async def loop() -> int:
        steps = 0
        async for batch in ot.rollouts(policy, EVEN, groups=2, group_size=4):
            samples = ot.train_samples(batch, advantage=ot.advantages.grpo)
            if not samples.inert:
                await policy.forward_backward(samples, loss=ot.PPO(), denominator=samples.loss_tokens)
                await policy.optim_step(ot.AdamW(lr=1e-4, clip_norm=1.0))
                await policy.publish()
                steps += 1
            if steps == 2:
                return steps
        return 0

    assert asyncio.run(loop()) == 2
    assert policy.version == 2


def test_fit_from_a_coroutine(doubles: World, tmp_path: Path) -> None:
    result = asyncio.run(
        ot.fit_async(EVEN, "tiny", steps=2, groups_per_step=1, run_dir=tmp_path, cluster=doubles.cluster)
    )
    assert len(result.metrics) == 2
    with pytest.raises(errors.UnsupportedOption, match="max_staleness"):
        asyncio.run(ot.fit_async(EVEN, "tiny", max_staleness=2))
