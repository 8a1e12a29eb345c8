"""Classes written for TRL's `environment_factory`."""

import random
from typing import Any

from opentinker.environments import Action, StepResult
from opentinker.environments.adapters.trl import trl_environment


class Guess:
    """A number from 1 to 1000 is guessed by a tool."""

    def reset(self, *, seed: int, **row: Any) -> str:
        self._number = random.Random(seed).randint(1, 1000)
        self._best = 1000
        return "Guess."

    def guess(self, number: int) -> int:
        """How far off it is.

        Args:
            number: what is guessed
        """
        self._best = min(self._best, abs(number - self._number))
        return abs(number - self._number)

    def get_reward(self) -> float:
        return 1 - self._best / 1000


def said(completions: list[Any], **more: Any) -> list[float | None]:
    """1 for whoever says that it is done; nothing where nothing is said."""
    last = completions[0][-1]["content"]
    return [float("done" in last) if last else None]


Guessing = trl_environment(Guess, reward_funcs=said, reward_weights=[2.0], deterministic=True)


class Crashing(Guessing):  # type: ignore[misc, valid-type]
    async def step(self, action: Action) -> StepResult:
        raise KeyError("broken")
