"""The work of the sampling benchmarks: prompts that are new in every repetition, and what is asked of them.

A prompt is a function of the repetition and its number, so that both sides of a pair get the same ones and no
cache of an earlier repetition helps.
"""

import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from benchmarks.programs import Program

MODEL = "smollm2-135m-instruct"
VOCABULARY = 49_152
"""Of that model."""
FIRST_WORD = 100
"""Ids below may be special tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """`requests` prompts of `prompt_tokens` tokens, `n` completions each, of `new_tokens` tokens: no end
    token ends one earlier.
    """

    repetition: int
    requests: int
    n: int
    prompt_tokens: int
    new_tokens: int
    stream: bool = False
    vocabulary: int = VOCABULARY
    """Ids of prompts are below."""

    @property
    def completions(self) -> int:
        return self.requests * self.n

    @property
    def tokens(self) -> int:
        """That come out."""
        return self.completions * self.new_tokens

    def prompt(self, number: int) -> list[int]:
        """The prompt of a request (0, 1, 2 ...)."""
        seed = (self.repetition, self.requests, self.prompt_tokens, number)
        ids: list[int] = (
            np.random.default_rng(seed).integers(FIRST_WORD, self.vocabulary, self.prompt_tokens).tolist()
        )
        return ids

    def seed(self, number: int) -> int:
        """Completion i of a request is drawn from this + i."""
        return 1000 * self.repetition + number * self.n

    def line(self) -> str:
        """As a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> "Work":
        return cls(**json.loads(line))


class Side:
    """A program that does a piece of work again and again, with new prompts each time."""

    def __init__(self, program: Program, work: Work) -> None:
        self._program = program
        self._work = work

    def seconds(self) -> float:
        """Of the next repetition."""
        return self.ask()["seconds"]

    def first_tokens(self, new_tokens: int) -> dict[str, float]:
        """The next repetition as streams of a few tokens: when the first ones came."""
        return self.ask(replace(self._work, stream=True, new_tokens=new_tokens))

    def ask(self, work: Work | None = None) -> dict[str, float]:
        """What the program answers to the next repetition."""
        line = (work or self._work).line()
        self._work = replace(self._work, repetition=self._work.repetition + 1)
        return self._program.ask(line)


def first_tokens(seconds: list[float]) -> dict[str, float]:
    """The median and the 99th percentile of times to first tokens."""
    return {
        "first_token_p50_s": round(float(np.percentile(seconds, 50)), 4),
        "first_token_p99_s": round(float(np.percentile(seconds, 99)), 4),
    }
