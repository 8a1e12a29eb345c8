"""The environment that both sides of `env_host` play: its rules, which import neither side.

A number is hidden; each step says whether the guess was too high or too low, and the number moves on when it
is found. It never ends by itself. `pause` is how long a step blocks.
"""

import random
import time

LIMIT = 1000


class Game:
    """One episode."""

    def __init__(self, pause: float = 0.0) -> None:
        self._pause = pause
        self._random = random.Random(0)
        self._number = 0

    def reset(self, seed: int) -> str:
        self._random = random.Random(seed)
        self._number = self._random.randrange(LIMIT)
        return f"I think of a number below {LIMIT}. Guess it."

    def step(self, text: str) -> tuple[str, float]:
        """What is answered, and the reward."""
        if self._pause:
            time.sleep(self._pause)
        guess = int(text) if text.isdigit() else -1
        if guess == self._number:
            self._number = self._random.randrange(LIMIT)
            return "Correct. I think of another one.", 1.0
        return ("Higher." if guess < self._number else "Lower.") + " Guess again.", 0.0
