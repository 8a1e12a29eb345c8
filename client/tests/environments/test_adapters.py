"""What adapters of environment libraries do beyond what all of them promise (tests/conformance)."""

import logging
import random
import sys
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from opentinker.environments import (
    Action,
    Environment,
    EnvironmentDefinitionError,
    Image,
    JointStep,
    RewardStatus,
    StepResult,
    environment_source,
)
from opentinker.environments.adapters.games import game_environment
from opentinker.environments.adapters.gem import gem_environment
from opentinker.environments.adapters.gymnasium import gymnasium_environment
from opentinker.environments.adapters.libraries import plain
from opentinker.environments.adapters.pettingzoo import pettingzoo_environment
from opentinker.environments.adapters.randomness import OwnRandomness
from opentinker.environments.adapters.reasoning_gym import reasoning_gym_environment
from opentinker.environments.adapters.skyrl_gym import skyrl_environment
from opentinker.environments.adapters.spaces import NoAction, Sayable, check_readable, check_sayable, in_words
from opentinker.environments.adapters.textarena import textarena_environment
from opentinker.environments.targets import Target
from opentinker.errors import InvalidArgument, MissingDependency

PAIR = spaces.Dict({"at": spaces.Box(-1, 1, (2,), np.float32), "key": spaces.Discrete(2)})


def begun(cls: type[Environment], seed: int = 1, task: dict[str, Any] | None = None, **options: Any) -> Any:
    """An instance and its first observation."""
    environment = cls(**options)
    return environment, environment.reset(seed=seed, task=task or {})


class TestSpaces:
    @pytest.mark.parametrize(
        ("space", "value", "text"),
        [
            (spaces.Discrete(5), np.int64(3), "3"),
            (spaces.Text(9), "ab", "ab"),
            (
                spaces.Box(0, 1, (2, 2), np.float32),
                np.array([[0.1, 1.0], [0.5, 0.25]], np.float32),
                "[[0.1, 1], [0.5, 0.25]]",
            ),
            (
                spaces.Box(-np.inf, np.inf, (2,)),
                np.array([np.inf, 1e9], np.float32),
                "[Infinity, 1000000000]",
            ),
            (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), "[1, 0, 1]"),
            (PAIR, {"at": np.array([0.5, -1], np.float32), "key": 1}, "at: [0.5, -1]\nkey: 1"),
            (spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), (1, "x"), "1\nx"),
            (
                spaces.Dict({"board": spaces.MultiBinary(2), "action_mask": spaces.MultiBinary(2)}),
                {"board": np.array([0, 1]), "action_mask": np.array([1, 0])},
                "[0, 1]",
            ),
        ],
    )
    def test_observations_in_words(self, space: Any, value: Any, text: str) -> None:
        check_readable(space)
        assert in_words(space, value) == text

    def test_what_has_no_text_is_refused_by_name(self) -> None:
        pixels = spaces.Dict({"eyes": spaces.Box(0, 255, (64, 64, 3), np.uint8)})
        with pytest.raises(EnvironmentDefinitionError, match=r"observation_space\['eyes'\].*pass render="):
            check_readable(pixels)
        graph = spaces.Graph(spaces.Discrete(2), None)
        with pytest.raises(EnvironmentDefinitionError, match="is a Graph"):
            check_readable(graph)
        with pytest.raises(EnvironmentDefinitionError, match=r"action_space is a Graph.*pass parse="):
            check_sayable(graph)

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("2", 2),
            ("I go from 1 to 3.", 3),
            ("3!", 3),
            ("-1", None),
            ("2.5", None),
            ("12", None),
            ("", None),
            ("x2", None),
        ],
    )
    def test_numbers_of_actions(self, text: str, number: int | None) -> None:
        sayable = Sayable(spaces.Discrete(3, start=1))
        assert sayable.names == ("1", "2", "3")
        if number is not None:
            assert sayable.read(text) == number
            return
        with pytest.raises(NoAction):
            sayable.read(text)

    def test_names_of_actions(self) -> None:
        sayable = Sayable(spaces.Discrete(3), ("up", "up left", "Down"))
        assert sayable.read("Not down, but UP LEFT") == 1
        assert sayable.read("upwards? no: up") == 0
        with pytest.raises(NoAction, match="not allowed"):
            sayable.read("down", np.array([1, 1, 0]))
        assert sayable.legal(np.array([0, 1, 1])) == ("up left", "Down")
        with pytest.raises(EnvironmentDefinitionError, match="2 names for 3 actions"):
            Sayable(spaces.Discrete(3), ("a", "b"))
        with pytest.raises(EnvironmentDefinitionError, match="names must differ"):
            Sayable(spaces.Discrete(2), ("a", "A"))
        with pytest.raises(EnvironmentDefinitionError, match="only a Discrete space"):
            Sayable(PAIR, ("a", "b"))
        assert Sayable(spaces.Discrete(1000)).legal(None) == ()

    @pytest.mark.parametrize(
        ("space", "text", "value"),
        [
            (spaces.MultiDiscrete([3, 3]), "I choose [2, 0].", [2, 0]),
            (spaces.MultiBinary(2), "[1,0]", [1, 0]),
            (spaces.Box(-1, 1, (1,), np.float32), "0.5", [0.5]),
            (spaces.Box(-1, 1, (2,), np.float32), "```json\n[0.25, -1]\n```", [0.25, -1]),
        ],
    )
    def test_numbers_as_json(self, space: Any, text: str, value: Any) -> None:
        action = Sayable(space).read(text)
        assert action.tolist() == value
        assert space.contains(action)

    @pytest.mark.parametrize(
        ("space", "text"),
        [
            (spaces.MultiDiscrete([3, 3]), "[3, 0]"),
            (spaces.MultiDiscrete([3, 3]), "[0.5, 0]"),
            (spaces.MultiDiscrete([3, 3]), "[1]"),
            (spaces.MultiDiscrete([3, 3]), "[[1, 2]"),
            (spaces.Box(-1, 1, (2,), np.float32), "[2, 0]"),
            (spaces.Box(-1, 1, (2,), np.float32), '["a", 0]'),
            (spaces.Box(-1, 1, (2,), np.float32), "[NaN, 0]"),
            (PAIR, '{"at": [0, 0]}'),
            (PAIR, '{"at": [0, 0], "key": true}'),
            (PAIR, '{"at": [0, 0], "key": 7}'),
            (PAIR, "[" * 100_000 + "]" * 100_000),
            (spaces.Text(3), "too long"),
        ],
    )
    def test_what_is_no_action_is_told(self, space: Any, text: str) -> None:
        with pytest.raises(NoAction):
            Sayable(space).read(text)


class Camera(gymnasium.Env[Any, Any]):
    """Pixels, and a mask in the info."""

    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.options = options
        return np.zeros((64, 64, 3), np.uint8), {"action_mask": np.array([0, 1]), "bad": np.nan, "of": self}

    def step(self, action: int) -> Any:
        return np.zeros((64, 64, 3), np.uint8), 1.0, False, True, {"action_mask": np.array([1, 0])}


gymnasium.register("Camera-v0", Camera)


class TestGymnasium:
    async def test_options_of_the_run_are_the_environments(self) -> None:
        cls = gymnasium_environment("FrozenLake-v1", is_slippery=False)
        assert (cls.__name__, cls.max_turns) == ("FrozenLake-v1", 0)
        source = await environment_source(cls, {"map_name": "8x8"})
        (session,) = await source.open_group(task={}, seed=1, size=1)
        await session.begin()
        for seq in range(1, 8):
            assert not (await session.step(Action("2"), seq)).done
        with pytest.raises(InvalidArgument, match=r"options of FrozenLake-v1.*colour") as raised:
            await environment_source(cls, {"colour": "red"})
        assert raised.value.field == "env_options"

    def test_what_does_not_exist_is_said_when_it_is_defined(self) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="Nowhere"):
            gymnasium_environment("Nowhere-v0")
        with pytest.raises(EnvironmentDefinitionError, match="pass render="):
            gymnasium_environment("Camera-v0")

    def test_render_parse_masks_and_tasks(self) -> None:
        def parse(text: str, space: Any) -> int:
            if text not in ("stay", "go"):
                raise ValueError("Say stay or go.")
            return int(text == "go")

        cls = gymnasium_environment(
            "Camera-v0",
            render=lambda seen, info: ["Look:", Image(bytes(seen.shape))],
            parse=parse,
            actions=("stay", "go"),
        )
        environment, first = begun(cls, task={"film": 1})
        assert environment._env.unwrapped.options == {"film": 1}
        assert first.content.parts[1] == Image(b"\x40\x40\x03")
        assert first.legal_actions == ("go",)
        # No mask, no NaN and no object of the library in what is logged.
        assert first.info == {"bad": "nan", "of": plain(environment._env.unwrapped)}
        for text, told in (("run", "Say stay or go."), ("stay", "That is not allowed now.")):
            result = environment.step(Action(text))
            assert (result.observation.text, result.reward.status) == (told, RewardStatus.UNSCORED)
            assert result.observation.legal_actions == ("go",)
        end = environment.step(Action("go"))
        assert (end.truncated, end.terminated, end.reward.value) == (True, False, 1.0)

    def test_instructions_are_the_system_message(self) -> None:
        _, first = begun(gymnasium_environment("CartPole-v1", instructions="Keep it upright."))
        assert [message.role for message in first.messages] == ["system", "user"]
        assert first.legal_actions == ("0", "1")


class TestPettingZoo:
    def test_the_kind_must_be_right(self) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="pass parallel=False"):
            pettingzoo_environment(Turns, parallel=True)
        with pytest.raises(EnvironmentDefinitionError, match="no_such"):
            pettingzoo_environment("classic/no_such_v1")
        with pytest.raises(EnvironmentDefinitionError, match="has no parallel_env"):
            pettingzoo_environment("pettingzoo.classic.tictactoe_v3", parallel=True)

    def test_rewards_come_with_the_move_that_earned_them(self) -> None:
        environment, _ = begun(pettingzoo_environment("classic/tictactoe_v3"))
        for move in ("0", "3", "1", "4"):
            step: JointStep = environment.step(
                {"player_1": Action(move)} if move in "01" else {"player_2": Action(move)}
            )
            assert {name: reward.value for name, reward in step.rewards.items()} == {
                "player_1": 0,
                "player_2": 0,
            }
        end = environment.step({"player_1": Action("2")})
        assert {name: reward.value for name, reward in end.rewards.items()} == {"player_1": 1, "player_2": -1}
        assert end.terminated
        assert set(end.ended) == {"player_1", "player_2"}


def Turns(**options: Any) -> Any:
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env(**options)


def test_what_a_copy_would_lose_is_said() -> None:
    """EzPickle makes a copy anew, without the state."""
    assert not pettingzoo_environment("classic/tictactoe_v3").copyable  # type: ignore[attr-defined]
    assert not pettingzoo_environment("classic/rps_v2", parallel=True).copyable  # type: ignore[attr-defined]
    assert gymnasium_environment("FrozenLake-v1").copyable  # type: ignore[attr-defined]


class TestTextArena:
    def test_players_and_games_must_fit(self) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="number of players has to be 2"):
            textarena_environment("TicTacToe-v0")
        with pytest.raises(EnvironmentDefinitionError, match="no game 'Chess-v99'"):
            textarena_environment("Chess-v99")

    def test_only_what_is_new_is_shown(self) -> None:
        environment, first = begun(textarena_environment("TicTacToe-v0", players=2))
        assert "You are Player 0 in Tic Tac Toe" in first["player_0"].text
        step = environment.step({"player_0": Action("[4]")})
        assert "You are Player 1 in Tic Tac Toe" in step.observations["player_1"].text
        assert "Player 0: [4]" in step.observations["player_1"].text
        step = environment.step({"player_1": Action("[0]")})
        text = step.observations["player_0"].text
        assert "You are Player 0" not in text, "the prompt is in the conversation already"
        assert "Player 0: [4]" not in text, "the player's own words are in the conversation already"
        assert "Player 1: [0]" in text


class TestReasoningGym:
    def test_tests_are_none_of_the_training_tasks(self) -> None:
        cls = reasoning_gym_environment("chain_sum", size=30, test_size=10, max_terms=4)
        train, test = cls().tasks("train"), cls().tasks("test")
        assert train is not None
        assert test is not None
        assert (len(train), len(test), cls().tasks("other")) == (30, 10, None)
        asked = {begun(cls, task=dict(task))[1].text for task in train}
        assert len(asked) == 30
        assert not asked & {begun(cls, task=dict(task))[1].text for task in test}

    def test_its_own_function_scores(self) -> None:
        cls = reasoning_gym_environment("chain_sum", size=3, instructions="Answer in tags.")
        environment, first = begun(cls, task={"index": 1})
        right = environment._entry["answer"]
        assert first.messages[0].content.text == "Answer in tags."
        result: StepResult = environment.step(Action(f"<answer>0</answer> no: <answer> {right}.0 </answer>"))
        assert result.reward.value == 1.0

    def test_a_scorer_that_fails_is_no_reward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

        def fails(self: Any, answer: Any, entry: Any) -> float:
            raise ArithmeticError("overflow")

        environment, _ = begun(reasoning_gym_environment("chain_sum", size=3))
        monkeypatch.setattr(ChainSumDataset, "score_answer", fails)
        result = environment.step(Action("1"))
        assert result.reward.status is RewardStatus.GRADER_ERROR
        assert result.info["grader_error"] == "ArithmeticError: overflow"

    def test_a_wrong_configuration_is_said_when_it_is_defined(self) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="max_terms must be >= min_terms"):
            reasoning_gym_environment("chain_sum", min_terms=5, max_terms=2)


class TestGem:
    def test_importing_it_leaves_logging_alone(self) -> None:
        for name in [name for name in sys.modules if name == "gem" or name.startswith("gem.")]:
            del sys.modules[name]
        root = logging.getLogger()
        before = (list(root.handlers), root.level)
        root.handlers.clear()
        try:
            gem_environment("game:GuessTheNumber-v0")
            assert root.handlers == []
        finally:
            root.handlers[:], root.level = before

    def test_the_suffix_is_shown(self) -> None:
        environment, first = begun(gem_environment("game:GuessTheNumber-v0"), max_number=9)
        assert "between 1 and 9" in first.text
        assert first.text.endswith("Enter your next guess.")
        assert environment.step(Action("\\boxed{15}")).observation.text.endswith("Enter your next guess.")


class TestSkyRL:
    def test_metrics_and_what_became_of_an_action(self) -> None:
        row = {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "reward_spec": {"ground_truth": "4"},
            "extra_info": {},
        }
        cls = skyrl_environment("gsm8k_multi_turn", [row], max_turns=2)
        environment, first = begun(cls, task=row)
        assert first.text == "2+2?"
        assert environment.step(Action("#### 5")).reward.value == pytest.approx(0.1)
        end = environment.step(Action("#### 4"))
        assert (end.terminated, end.reward.value, end.observation) == (True, 1.0, None)
        assert environment.metrics() == {"steps": 2}
        with pytest.raises(EnvironmentDefinitionError, match="no 'gsm9k'; known: aime, gsm8k"):
            skyrl_environment("gsm9k", [row])
        with pytest.raises(InvalidArgument, match="no rows"):
            skyrl_environment("gsm8k", [])


class Ladder:
    """Climb."""

    def __init__(self, rungs: int = 3) -> None:
        self.rungs = rungs

    def reset(self, start: int = 0, **_: Any) -> str:
        return f"You stand on {start} of {self.rungs}."

    def step(self, action: str) -> Any:
        return action

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return "Climb."


class TestGames:
    def test_tasks_are_what_reset_gets(self) -> None:
        cls = game_environment(Ladder, {"train": [{"start": 1}], "test": [{"start": 2}]})
        assert cls.splits == ("train", "test")
        _, first = begun(cls, task={"start": 2}, rungs=9)
        assert [message.role for message in first.messages] == ["user"]
        assert first.text == "Climb.\n\nYou stand on 2 of 9."

    async def test_what_is_missing_is_named(self) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="has no reset and no step"):
            game_environment(dict)
        with pytest.raises(EnvironmentDefinitionError, match="names nothing as module:name"):
            game_environment("no_module_here:Game")
        with pytest.raises(InvalidArgument, match="options of Ladder"):
            await environment_source(game_environment(Ladder), {"colour": 1})
        environment, _ = begun(game_environment(Ladder))
        with pytest.raises(ValueError, match="has no observation and no reward and no done"):
            environment.step(Action("up"))


def test_randomness_of_threads_does_not_mix() -> None:
    """Steps of two episodes in two threads draw what each draws alone."""

    def play(own: OwnRandomness, drawn: list[Any]) -> None:
        for _ in range(200):
            with own():
                drawn.append((random.random(), float(np.random.random())))

    alone: list[list[Any]] = [[], []]
    for seed in (0, 1):
        play(OwnRandomness(seed), alone[seed])
    together: list[list[Any]] = [[], []]
    threads = [threading.Thread(target=play, args=(OwnRandomness(seed), together[seed])) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize(
    ("module", "extra", "define"),
    [
        ("gymnasium", "gymnasium", lambda: gymnasium_environment("CartPole-v1")),
        ("pettingzoo", "pettingzoo", lambda: pettingzoo_environment("classic/rps_v2")),
        ("textarena", "textarena", lambda: textarena_environment("TicTacToe-v0")),
        ("reasoning_gym", "reasoning-gym", lambda: reasoning_gym_environment("chain_sum")),
        ("gem", "gem", lambda: gem_environment("game:GuessTheNumber-v0")),
        ("skyrl_gym", "skyrl-gym", lambda: skyrl_environment("gsm8k", [{}])),
    ],
)
def test_a_missing_library_names_its_extra(
    module: str, extra: str, define: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=rf"pip install 'opentinker\[{extra}\]'"):
        define()


class TestTargets:
    def test_a_call_of_literals(self) -> None:
        target = Target.read('a.b:c.D("x", n=[1, {"k": None}])')
        assert (target.module, target.attributes) == ("a.b", ("c", "D"))
        assert target.arguments == (("x",), {"n": [1, {"k": None}]})
        assert Target.read("a:B").arguments is None
        assert Target.read("builtins:dict(a=1)").made_of(__import__("builtins")) == {"a": 1}

    @pytest.mark.parametrize(
        "text", ["a", "a:", "a:1", "a:f(g())", "a:f(**{})", "a:f(x)", "a:f()()", "a:f(", "a:f(*[1])"]
    )
    def test_nothing_is_evaluated(self, text: str) -> None:
        with pytest.raises(EnvironmentDefinitionError, match="module:Class"):
            Target.read(text)
