"""The game of `env_host` as our environments; only worker processes import this module."""

from typing import Any

from benchmarks.env_game import Game
from opentinker.environments.base import Environment
from opentinker.environments.types import Action, Observation, StepResult


class Plain(Environment):
    """The game."""

    def __init__(self, pause: float = 0.0) -> None:
        self._game = Game(pause)

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation(self._game.reset(seed))

    def step(self, action: Action) -> StepResult:
        return StepResult(*self._game.step(action.text))


class OnTheLoop(Environment):
    """The game in `async` methods, which block all the same."""

    def __init__(self, pause: float = 0.0) -> None:
        self._game = Game(pause)

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation(self._game.reset(seed))

    async def step(self, action: Action) -> StepResult:
        return StepResult(*self._game.step(action.text))
