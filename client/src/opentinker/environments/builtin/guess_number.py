"""Find a hidden number by asking: several turns."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.environments.base import Environment
from opentinker.environments.builtin.draws import draw
from opentinker.environments.builtin.numbers import integer
from opentinker.environments.errors import InvalidEpisodeData, InvalidOptions
from opentinker.environments.types import Action, Observation, StepResult


class GuessNumber(Environment):
    """Find the hidden number from `low` to `high` in at most `max_guesses` guesses; the reward is 1 if found.

    After a wrong guess the answer is "higher" or "lower". An answer without a number costs a guess and is
    told so.
    """

    max_turns: ClassVar[int] = 7

    def __init__(self, low: int = 1, high: int = 20, max_guesses: int = 7) -> None:
        if not 0 <= low <= high:
            raise InvalidOptions(f"guess_number needs 0 <= low <= high, not low={low}, high={high}")
        if not 1 <= max_guesses <= 7:
            raise InvalidOptions(f"max_guesses is from 1 to 7, not {max_guesses}")
        self._low = low
        self._high = high
        self._max_guesses = max_guesses
        self._number = low
        self._guesses = 0
        self._found = False

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self._number = task.get("number", self._low + draw(seed, "guess_number", self._high - self._low + 1))
        if not isinstance(self._number, int) or not self._low <= self._number <= self._high:
            raise InvalidEpisodeData(f"number must be from {self._low} to {self._high}, not {self._number}")
        return Observation(
            f"I think of a number from {self._low} to {self._high}. "
            f"Guess it in at most {self._max_guesses} guesses. Answer with a number only.",
            info={"guesses_left": self._max_guesses},
        )

    def step(self, action: Action) -> StepResult:
        self._guesses += 1
        left = self._max_guesses - self._guesses
        numbers = re.findall(r"\d+", action.text)
        guess = integer(numbers[-1]) if numbers else None
        info = {"guess": guess, "guesses_left": left}
        if guess == self._number:
            self._found = True
            return StepResult(Observation("Correct."), 1.0, terminated=True, info=info)
        if guess is None:
            hint = f"That is no number from {self._low} to {self._high}."
        else:
            hint = "Higher." if guess < self._number else "Lower."
        if left == 0:
            return StepResult(Observation(f"{hint} No guesses are left."), 0.0, terminated=True, info=info)
        return StepResult(Observation(f"{hint} Guess again.", info={"guesses_left": left}), info=info)

    def metrics(self) -> Mapping[str, float]:
        return {"guesses": self._guesses, "found": float(self._found)}
