"""The game that both sides of `env_host` play."""

import pytest

from benchmarks.env_game import LIMIT, Game
from benchmarks.env_host import CASES, DEFAULT_CASES, run
from benchmarks.env_ours import OnTheLoop, Plain
from benchmarks.pairs import Options
from opentinker.environments.types import Action


def test_the_game_never_ends_and_the_same_seed_is_the_same_game() -> None:
    one, other = Game(), Game()
    assert one.reset(7) == other.reset(7)
    low, high = 0, LIMIT
    rewards = 0.0
    for _ in range(40):
        guess = (low + high) // 2
        said, reward = one.step(str(guess))
        assert other.step(str(guess)) == (said, reward)
        rewards += reward
        if reward:
            low, high = 0, LIMIT
        elif said.startswith("Higher"):
            low = guess + 1
        else:
            high = guess
    assert rewards >= 3


async def test_our_environments_are_that_game() -> None:
    game, plain, on_the_loop = Game(), Plain(), OnTheLoop()
    first = game.reset(3)
    assert plain.reset(seed=3, task={}).text == first
    assert (await on_the_loop.reset(seed=3, task={})).text == first
    for guess in ("1", "999", "no number"):
        said, reward = game.step(guess)
        for result in (plain.step(Action(guess)), await on_the_loop.step(Action(guess))):
            assert result.observation is not None
            assert (result.observation.text, result.reward.value, result.done) == (said, reward, False)


def test_a_case_that_there_is_not_is_refused_before_anything_starts() -> None:
    with pytest.raises(SystemExit, match="unknown case 'none'"):
        next(iter(run(Options(cases=frozenset({"none"})))))
    assert set(DEFAULT_CASES) <= set(CASES)
