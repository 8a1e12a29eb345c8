"""The environment API without a session: what may be written, and what is refused."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from opentinker.environments import (
    Action,
    Array,
    Content,
    EndReason,
    Environment,
    EnvironmentDefinitionError,
    Image,
    InvalidEpisodeData,
    InvalidOptions,
    InvalidReward,
    JointStep,
    Message,
    Metric,
    Observation,
    Reward,
    RewardKind,
    RewardStatus,
    RewardSum,
    StepResult,
    ToolCall,
    describe,
    environment_source,
    single_turn,
)
from opentinker.environments.builtin import Arithmetic, GuessNumber
from opentinker.environments.builtin.arithmetic import last_integer
from opentinker.environments.measures import joined, plain_metrics, read_metrics
from opentinker.environments.rewards import total
from opentinkerapi.runtime.errors import InvalidArgument


def test_defining_an_environment_imports_no_grpc_numpy_or_torch() -> None:
    code = "import sys, opentinker.environments.builtin as b; print([m for m in sys.modules if m in %r])"
    heavy = ("grpc", "numpy", "torch", "google.protobuf")
    output = subprocess.run(
        [sys.executable, "-c", code % (heavy,)], check=True, capture_output=True, text=True
    )
    assert output.stdout.strip() == "[]"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", np.float32("nan"), object()])
def test_rewards_that_are_no_finite_numbers_are_refused(value: Any) -> None:
    with pytest.raises(InvalidReward):
        Reward(value)
    with pytest.raises(InvalidReward):
        StepResult(reward=value, terminated=True)
    with pytest.raises(InvalidReward):
        Reward(1.0, components={"style": value})


def test_a_reward_left_out_is_unscored_and_not_0() -> None:
    result = StepResult(terminated=True)
    assert result.reward.status is RewardStatus.UNSCORED
    assert result.reward.value is None
    assert StepResult(reward=0, terminated=True).reward == Reward(0.0)
    with pytest.raises(InvalidReward):
        Reward(1.0, RewardStatus.UNSCORED)
    with pytest.raises(InvalidReward):
        Reward(None)


def test_rewards_of_all_kinds_add_up() -> None:
    delta, unscored = Reward(0.5), Reward.unscored()
    cumulative = Reward(2.0, kind=RewardKind.CUMULATIVE, components={"a": 2.0})
    terminal = Reward(7.0, kind=RewardKind.TERMINAL)
    rewards = RewardSum()
    assert [rewards.add(reward) for reward in (delta, unscored, cumulative, delta, terminal)] == [
        0.5,
        None,
        1.5,
        0.5,
        4.5,
    ]
    assert rewards.total.value == 7.0
    with pytest.raises(InvalidReward, match="after the TERMINAL"):
        rewards.add(delta)
    assert total([]).status is RewardStatus.UNSCORED
    assert total([unscored]).status is RewardStatus.UNSCORED
    assert total([delta, Reward.failed(RewardStatus.TIMEOUT), delta]).status is RewardStatus.TIMEOUT
    assert total([Reward(1.0, components={"a": 1.0}), Reward(1.0, components={"a": 0.5})]).components == {
        "a": 1.5
    }
    with pytest.raises(InvalidReward):
        total([Reward(1e308), Reward(1e308)])


def test_metrics_of_many_episodes_are_one_number_by_their_kind() -> None:
    episodes = [
        {"rate": Metric(1.0, weight=1), "solved": 1.0, "most": Metric(3, kind="max")},
        {"rate": Metric(0.5, weight=3), "solved": 0.0, "most": Metric(7, kind="max")},
        {"calls": Metric(4, kind="sum"), "least": Metric(2, kind="min"), "none": Metric(9.0, weight=0)},
        {"calls": Metric(5, kind="sum"), "least": Metric(1, kind="min")},
    ]
    assert joined(episodes) == {
        "calls/sum": 9.0,
        "least/min": 1.0,
        "most/max": 7.0,
        "rate/mean": 0.625,
        "solved/mean": 0.5,
    }
    for given in episodes:
        assert read_metrics(json.loads(json.dumps(plain_metrics(given)))) == read_metrics(given)
    for wrong in (
        math.nan,
        math.inf,
        "1",
        None,
        Metric,
        {"value": 1, "weight": -1},
        {"value": 1, "kind": "p99"},
    ):
        with pytest.raises((InvalidEpisodeData, TypeError)):
            read_metrics({"a": wrong})
    with pytest.raises(InvalidEpisodeData, match="must be a dict"):
        read_metrics([1])


def test_a_joint_step_says_whose_move_it_is() -> None:
    step = JointStep({"a": "hi"}, {"a": 1, "b": None}, ended={"b": "TRUNCATED"})
    assert step.observations == {"a": Observation("hi")}
    assert step.rewards == {"a": Reward(1.0), "b": Reward.unscored()}
    assert step.ended == {"b": EndReason.TRUNCATED}
    assert JointStep(terminated=True).done
    for wrong in (
        {},
        {"observations": {"a": 7}},
        {"observations": ["a"]},
        {"observations": {1: "x"}},
        {"observations": {"a": "x"}, "ended": {"b": "ENV_CRASH"}},
        {"observations": {"a": "x"}, "rewards": 1.0},
    ):
        with pytest.raises(InvalidEpisodeData):
            JointStep(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidReward):
        JointStep({"a": "x"}, {"a": math.nan})


def test_observations_are_content_or_messages() -> None:
    assert Observation("hi").as_messages() == (Message("user", "hi"),)
    assert Observation("hi") == Observation(Content.of("hi"))
    assert Observation(messages=[{"role": "user", "content": "hi"}]).text == "hi"
    for wrong in ({}, {"content": "a", "messages": [Message("user", "b")]}, {"content": 7}):
        with pytest.raises(InvalidEpisodeData):
            Observation(**wrong)  # type: ignore[arg-type]
    for message in ({"content": "no role"}, {"role": "wizard"}, {"role": "user", "text": "x"}, "hi"):
        with pytest.raises(InvalidEpisodeData):
            Observation(messages=[message])  # type: ignore[list-item]
    with pytest.raises(InvalidEpisodeData, match="JSON"):
        Observation("hi", info={"x": object()})
    with pytest.raises(InvalidEpisodeData):
        Observation("hi", info={"x": math.nan})
    with pytest.raises(InvalidEpisodeData, match="next observation"):
        StepResult(reward=1.0)


def test_messages_have_openais_shape() -> None:
    shape = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }
    message = Message.of(shape)
    assert message.tool_calls == (ToolCall("f", '{"x":1}', "1"),)
    assert message.to_dict() == shape
    # What the model got wrong stays as it is.
    assert ToolCall("f", '{"x":').to_dict()["function"]["arguments"] == '{"x":'
    with pytest.raises(InvalidEpisodeData, match="no text form"):
        Message("user", Array.of(np.zeros(2))).to_dict()


def test_images_and_arrays_that_cannot_travel_are_refused() -> None:
    array = Array.of(np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)))
    assert np.array_equal(array.numpy(), np.arange(6).reshape(2, 3))
    for make in (
        lambda: Image(b"x", "image/bmp"),
        lambda: Image(bytes(16 * 1024 * 1024 + 1)),
        lambda: Array.of(np.zeros(2, dtype=np.float16)),
        lambda: Array.of(np.zeros(600_000, dtype=np.float32)),
    ):
        with pytest.raises(InvalidEpisodeData):
            make()


def test_what_ended_an_episode_says_whether_it_is_trained_on() -> None:
    infrastructure = {
        "STEP_TIMEOUT",
        "EPISODE_TIMEOUT",
        "CANCELLED",
        "ENV_CRASH",
        "SANDBOX_LOST",
        "LEASE_EXPIRED",
    }
    assert {end.name for end in EndReason if not end.trainable} == infrastructure


async def test_classes_that_cannot_be_played_are_refused() -> None:
    class Half(Environment):
        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            return Observation("")

    class Duel(Half):
        agents: ClassVar[tuple[str, ...]] = ("white", "black")

        def step(self, action: Action) -> StepResult:
            return StepResult(terminated=True)

    with pytest.raises(EnvironmentDefinitionError, match="does not define step"):
        describe(Half)
    assert describe(Duel).agents == ("white", "black")
    for wrong_names in ((), ("a", "a"), ("a b",), ("",), "ab", (1, 2)):
        Duel.agents = wrong_names  # type: ignore[assignment]
        with pytest.raises(EnvironmentDefinitionError, match=r"Duel\.agents is"):
            await environment_source(Duel)
    for wrong in (GuessNumber(), int, None):
        with pytest.raises(EnvironmentDefinitionError):
            await environment_source(wrong)  # type: ignore[arg-type]
    for options, message in (
        ({"hihg": 3}, "allowed: low, high, max_guesses"),
        ({"low": 9, "high": 3}, "low <= high"),
    ):
        with pytest.raises(InvalidArgument, match=message) as raised:
            await environment_source(GuessNumber, options)
        assert raised.value.field == "env_options"
    with pytest.raises(InvalidOptions, match="low <= high"):
        GuessNumber(low=5, high=3)


async def play(
    env: type[Environment], answer: str, task: dict[str, Any] | None = None
) -> tuple[str, StepResult]:
    source = await environment_source(env)
    (session,) = await source.open_group(task=task or {}, seed=0, size=1)
    return (await session.begin()).text, await session.step(Action(answer), 1)


async def test_single_turn_from_tasks_and_a_reward() -> None:
    tasks = {"train": [{"prompt": "1 + 1 =", "answer": "2"}], "test": [{"prompt": "2 + 2 =", "answer": "4"}]}
    seen = []

    def exact(answer: str, task: dict[str, Any]) -> float:
        """Is the answer exact?"""
        seen.append(task)
        return float(answer == task["answer"])

    env = single_turn(tasks, reward=exact)
    assert describe(env).splits == ("train", "test")
    assert describe(env).description == "Is the answer exact?"
    source = await environment_source(env)
    assert await source.tasks("test") == tasks["test"]
    text, result = await play(env, "2", tasks["train"][0])
    assert (text, result.reward.value, result.terminated) == ("1 + 1 =", 1.0, True)
    assert (await play(env, "3", tasks["train"][0]))[1].reward.value == 0.0
    assert seen[0] == tasks["train"][0]


async def test_single_turn_prompts_async_rewards_and_failing_graders() -> None:
    task = {"a": 1, "b": 2}

    async def later(answer: str, task: dict[str, Any]) -> float | None:
        return None if answer == "?" else 0.5

    env = single_turn([task], reward=later, prompt="{a} + {b} =")
    text, result = await play(env, "x", task)
    assert (text, result.reward.value) == ("1 + 2 =", 0.5)
    assert (await play(env, "?", task))[1].reward.status is RewardStatus.UNSCORED
    chat = single_turn(
        [task], reward=later, prompt=lambda task: [{"role": "system", "content": str(task["a"])}]
    )
    assert (await play(chat, "x", task))[0] == "1"
    for grader in (lambda answer, task: 1 / 0, lambda answer, task: math.nan):
        _, result = await play(single_turn([task], reward=grader, prompt="{a}"), "x", task)
        assert result.reward.status is RewardStatus.GRADER_ERROR
        assert result.info["grader_error"]
    with pytest.raises(EnvironmentDefinitionError):
        single_turn([], reward=later)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("34", 34),
        ("The answer is 34.", 34),
        ("12 - 34 = -22", -22),
        ("12-34=-22", -22),
        ("50-28", 28),
        ("50 - 28", 28),
        ("-5", -5),
        ("is −5", -5),
        ("first 3, then 4\n", 4),
        ("3.5", None),
        ("3.0", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_last_integer_of_an_answer(text: str, number: int | None) -> None:
    assert last_integer(text) == number


def test_arithmetic_never_draws_a_test_problem() -> None:
    for options in ({}, {"min": 1, "max": 3}):
        environment = Arithmetic(**options)
        held_out = {(task["a"], task["op"], task["b"]) for task in environment.tasks("test") or ()}
        drawn = [environment._draw(seed) for seed in range(2000)]
        assert held_out
        assert not held_out & set(drawn)
        assert {operator for _, operator, _ in drawn} == {"+", "-"}
    assert len(held_out) == 4
    operands = [number for a, _, b in (Arithmetic()._draw(seed) for seed in range(3000)) for number in (a, b)]
    assert (min(operands), max(operands)) == (2, 99)


async def test_guess_number_can_be_won_by_halving_and_ends_after_its_guesses() -> None:
    source = await environment_source(GuessNumber, {"low": 1, "high": 100})
    for seed in range(20):
        (session,) = await source.open_group(task={}, seed=seed, size=1)
        await session.begin()
        low, high = 1, 100
        for seq in range(1, 8):
            guess = (low + high) // 2
            result = await session.step(Action(f"My guess: {guess}"), seq)
            if result.done:
                break
            assert result.observation is not None
            low, high = (guess + 1, high) if "Higher" in result.observation.text else (low, guess - 1)
        assert (await session.finalize()).reward.value == 1.0
    (session,) = await source.open_group(task={"number": 100}, seed=0, size=1)
    await session.begin()
    for seq in range(1, 8):
        result = await session.step(Action("no idea" if seq % 2 else "1"), seq)
        assert result.terminated == (seq == 7)
    assert (await session.finalize()).reward.value == 0.0


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        (Arithmetic(), {"a": 123_456, "op": "+", "b": 654_321}),
        (GuessNumber(high=999_999), {"number": 777_777}),
    ],
    ids=["arithmetic", "guess_number"],
)
@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch {marker}')",
        "eval(\"open('{marker}', 'w')\")",
        "9**9**9",
        "9" * 100_000,
        "-" * 100_000,
        "1." * 50_000,
    ],
    ids=["import", "eval", "power", "digits", "signs", "dots"],
)
def test_b50_what_a_model_says_is_never_run(
    environment: Environment, task: dict[str, Any], text: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    environment.reset(seed=0, task=task)
    started = time.process_time()
    result = environment.step(Action(text.format(marker=marker)))
    assert time.process_time() - started < 1
    assert not result.reward.value
    assert not marker.exists()
