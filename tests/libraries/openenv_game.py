"""An OpenEnv environment, its server (`python openenv_game.py PORT`), and what env_host imports."""

import os
import random
import sys
import time
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from opentinker.environments.adapters.openenv import openenv_environment


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    text: str
    tries: int = 0


class Guess(Environment[GuessAction, GuessObservation, State]):
    """A number from 1 to 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, high: int = 9, **kwargs: Any
    ) -> GuessObservation:
        self._number = random.Random(seed).randint(1, high)
        self._tries = 0
        return GuessObservation(text=f"1 to {high}")

    def step(self, action: GuessAction, timeout_s: float | None = None, **kwargs: Any) -> GuessObservation:
        if action.guess == 77:
            raise KeyError("broken")
        if action.guess == 78:
            time.sleep(30)
        if action.guess == 79:
            os._exit(3)
        self._tries += 1
        right = action.guess == self._number
        words = "right" if right else "higher" if action.guess < self._number else "lower"
        reward = 1.0 if right else None if self._tries == 1 else -0.1
        return GuessObservation(text=words, tries=self._tries, reward=reward, done=right)

    @property
    def state(self) -> State:
        return State()


class SayAction(Action):
    message: str


class SayObservation(Observation):
    echo: str


class Echo(Environment[SayAction, SayObservation, State]):
    """Says it again; `async`, and it takes no seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self) -> SayObservation:  # type: ignore[override]
        return SayObservation(echo="hello")

    def step(self, action: SayAction, timeout_s: float | None = None, **kwargs: Any) -> SayObservation:
        raise AssertionError("the async form is there")

    async def step_async(
        self, action: SayAction, timeout_s: float | None = None, **kwargs: Any
    ) -> SayObservation:
        return SayObservation(echo=action.message * 2, reward=len(action.message))

    @property
    def state(self) -> State:
        return State()


HostedGuess = openenv_environment(Guess, action=GuessAction, deterministic=True)


if __name__ == "__main__":
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    application = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=64)
    uvicorn.run(application, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
