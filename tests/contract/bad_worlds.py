"""Environments that do everything wrong, for `test_bad_environments`. Worker processes import it too."""

import asyncio
import math
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from opentinker.environments import (
    Action,
    Array,
    Content,
    Environment,
    Json,
    Observation,
    StepResult,
    ToolEnvironment,
    tool,
)


def _raise(error: BaseException) -> Any:
    raise error


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["again"] = circle
    return circle


def _deep() -> Any:
    value: Any = 0
    for _ in range(100_000):
        value = [value]
    return value


def _eat() -> Any:
    held = []
    while True:
        held.append(bytearray(32 << 20))


def _fork() -> StepResult:
    # The child comes back from the step too, as after a careless os.fork().
    os.fork()
    return StepResult("on")


def _fork_and_leave() -> StepResult:
    if not os.fork():
        os._exit(0)
    os.wait()
    return StepResult("on")


def _reseed() -> StepResult:
    random.seed(0)
    np.random.seed(0)
    return StepResult("on")


def _print() -> StepResult:
    print("x" * 1_000_000)  # noqa: T201
    os.write(1, b"\x00\xff not a frame\n")
    sys.stderr.write("and here\n")
    return StepResult("on")


def _hang() -> StepResult:
    time.sleep(4.0)
    return StepResult("on")


MISDEEDS: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(KeyError("lost")),
    "raises StopIteration": lambda: next(iter(())),
    "leaves the program": lambda: sys.exit(0),
    "is interrupted": lambda: _raise(KeyboardInterrupt()),
    "is cancelled": lambda: _raise(asyncio.CancelledError()),
    "has no memory": lambda: _raise(MemoryError()),
    "recurses": lambda: (lambda f: f(f))(lambda f: f(f)),
    "gives None": lambda: None,
    "gives what Gymnasium gives": lambda: ("on", 0.0, False, False, {}),
    "gives another observation": lambda: StepResult(7),  # type: ignore[arg-type]
    "gives bytes": lambda: StepResult(Observation(b"on")),  # type: ignore[arg-type]
    "gives no part": lambda: StepResult(Observation(Content((7,)))),  # type: ignore[arg-type]
    "gives text that is none": lambda: StepResult(Observation(Content((Json(7),)))),  # type: ignore[arg-type]
    "gives half a character": lambda: StepResult("\ud83d"),
    "gives 10 MB": lambda: StepResult("x" * 10_000_000),
    "gives 10 MB of numbers": lambda: StepResult(Observation(Array.of(np.zeros(10_000_000, np.uint8)))),
    "gives 10 MB to the log": lambda: StepResult("on", info={"x": "x" * 10_000_000}),
    "gives 70 MB in parts": lambda: StepResult(
        Observation([Array.of(np.zeros(2_000_000, np.uint8))] * 35 + ["x" * 5_000_000])
    ),
    "gives an array of objects": lambda: StepResult(Observation(Array.of(np.array([None])))),
    "gives NaN": lambda: StepResult("on", math.nan),
    "gives infinity": lambda: StepResult("on", np.float32("inf")),
    "gives a reward in words": lambda: StepResult("on", "1.0"),  # type: ignore[arg-type]
    "gives several rewards": lambda: StepResult("on", np.zeros(3)),  # type: ignore[arg-type]
    "gives a reward too large": lambda: StepResult("on", 10**400),
    "gives no JSON": lambda: StepResult("on", info={"x": object()}),
    "gives NaN as JSON": lambda: StepResult("on", info={"x": math.nan}),
    "gives a circle as JSON": lambda: StepResult("on", info=_circle()),
    "gives JSON without a bottom": lambda: StepResult("on", info={"x": _deep()}),
    "ends and starts over": lambda: StepResult(),
}
"""What a step may do wrong; each ends its episode as ENV_CRASH."""

HARMLESS: dict[str, Callable[[], StepResult]] = {
    "forks": _fork_and_leave,
    "reseeds all randomness": _reseed,
    "prints": _print,
}
"""What a step may do without harm."""

HOSTED: dict[str, Callable[[], Any]] = {"eats memory": _eat, "forks in two": _fork, "hangs": _hang}
"""What only a process of its own can take."""

ENDINGS: dict[str, Any] = {
    "NaN": math.nan,
    "words": "much",
    "too large": 10**400,
    "a list": [1.0],
}
"""What `finalize` and `metrics` may give wrong."""


class Bad(Environment):
    """Does what it is told, and gives 1.0 for "end". `at`: what is done wrong elsewhere than in a step."""

    splits: ClassVar[tuple[str, ...]] = ()

    def __init__(self, at: str = "", misdeed: str = "") -> None:
        self._at = at
        self._misdeed = misdeed

    def reset(self, *, seed: int, task: dict[str, Any]) -> Any:
        self._random = random.Random(seed)
        if self._at == "reset":
            result = MISDEEDS[self._misdeed]()
            return result.observation if isinstance(result, StepResult) else result
        return Observation("Misbehave.")

    def step(self, action: Action) -> Any:
        if action.text == "end":
            return StepResult(None, 1.0, terminated=True)
        for deeds in (MISDEEDS, HARMLESS, HOSTED):
            if action.text in deeds:
                return deeds[action.text]()
        return StepResult(str(self._random.random()))

    def finalize(self) -> Any:
        if self._at == "finalize":
            return ENDINGS[self._misdeed] if self._misdeed in ENDINGS else MISDEEDS[self._misdeed]()
        return None

    def metrics(self) -> Any:
        return {"m": ENDINGS[self._misdeed]} if self._at == "metrics" else {}


class BadAsync(Bad):
    """The same in `async` methods."""

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Any:
        return super().reset(seed=seed, task=task)

    async def step(self, action: Action) -> Any:
        return super().step(action)


class Endless(Environment):
    """Never ends, and says nothing of rewards."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation("Go on.")

    def step(self, action: Action) -> StepResult:
        return StepResult("Go on.")


class Belt(ToolEnvironment):
    """Has one tool, and half a point for each use of it."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation("Count.")

    @tool
    def count(self, number: int) -> int:
        """Count."""
        return number + 1

    def answered(self, text: str) -> StepResult:
        return StepResult(reward=1.0, terminated=True)
