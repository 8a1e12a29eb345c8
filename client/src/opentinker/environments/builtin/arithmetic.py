"""Add and subtract two numbers in one turn."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from opentinker.environments.base import Environment, Task
from opentinker.environments.builtin.draws import draw
from opentinker.environments.builtin.numbers import integer
from opentinker.environments.errors import InvalidEpisodeData, InvalidOptions
from opentinker.environments.types import Action, Observation, StepResult

Problem = tuple[int, str, int]

OPERATORS = ("+", "-")
TEST_SIZE = 200

# A minus directly after a number is the operator: "50-28" ends on 28, "50-78=-28" on -28.
_NUMBER = re.compile(r"(?:(?<![\d.])(?<![\d.] )[-−])?\d+(?:\.\d+)?")


class Arithmetic(Environment):
    """Compute a + b or a − b; the reward is 1 if the last integer of the answer is right, otherwise 0.

    Operands are uniform from `min` to `max`. Training problems are drawn from the seed; the split "test" is a
    fixed set of held-out problems that training never draws.
    """

    max_turns: ClassVar[int] = 1
    splits: ClassVar[tuple[str, ...]] = ("test",)

    def __init__(self, min: int = 2, max: int = 99) -> None:
        if not 0 <= min < max <= 10**9:
            raise InvalidOptions(f"arithmetic needs 0 <= min < max <= 10**9, not min={min}, max={max}")
        self._min = min
        self._span = max - min + 1
        self._answer = 0

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        a, operator, b = _read(task) if task else self._draw(seed)
        self._answer = a + b if operator == "+" else a - b
        return Observation(f"What is {a} {operator} {b}? Answer with the number only.")

    def step(self, action: Action) -> StepResult:
        given = last_integer(action.text)
        info = {"answer": self._answer, "given": given}
        return StepResult(reward=float(given == self._answer), terminated=True, info=info)

    def tasks(self, split: str) -> Sequence[Task] | None:
        if split != "test":
            return None
        return [{"a": a, "op": operator, "b": b} for a, operator, b in _held_out(self._min, self._span)]

    def _draw(self, seed: int) -> Problem:
        held_out = _held_out(self._min, self._span)
        attempt = 0
        while (problem := _problem(seed, f"arithmetic:{attempt}", self._min, self._span)) in held_out:
            attempt += 1
        return problem


@lru_cache(maxsize=16)
def _held_out(least: int, span: int) -> Mapping[Problem, None]:
    """The test problems, in order: 200, or a quarter of all where those are fewer."""
    size = min(TEST_SIZE, span * span * len(OPERATORS) // 4)
    problems: dict[Problem, None] = {}
    index = 0
    while len(problems) < size:
        problems[_problem(index, "arithmetic:test", least, span)] = None
        index += 1
    return problems


def _problem(seed: int, purpose: str, least: int, span: int) -> Problem:
    index = draw(seed, purpose, span * span * len(OPERATORS))
    index, which = divmod(index, len(OPERATORS))
    a, b = divmod(index, span)
    return least + a, OPERATORS[which], least + b


def last_integer(text: str) -> int | None:
    """The last number in a text if it is an integer."""
    numbers = _NUMBER.findall(text)
    if not numbers or "." in numbers[-1]:
        return None
    return integer(numbers[-1].replace("−", "-"))


def _read(task: Mapping[str, Any]) -> Problem:
    try:
        a, operator, b = task["a"], task["op"], task["b"]
    except KeyError as missing:
        raise InvalidEpisodeData(f"a task of arithmetic has a, op and b; {missing} is missing") from None
    if operator not in OPERATORS or not isinstance(a, int) or not isinstance(b, int):
        raise InvalidEpisodeData(f"a task of arithmetic is two integers and + or -, not {dict(task)}")
    return a, operator, b
