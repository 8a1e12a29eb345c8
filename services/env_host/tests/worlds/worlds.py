"""Environments that behave badly on purpose. Only worker processes import this module."""

import asyncio
import os
import random
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

from opentinker.environments import Action, Environment, Image, Observation, Reward, StepResult


class Counter(Environment):
    """Counts its steps; a step does what its action says. Observations also tell the process."""

    splits: ClassVar[tuple[str, ...]] = ("train",)

    def __init__(self, start: int = 0, flag: str = "", tell_process: bool = False) -> None:
        self._count = start
        self._flag = Path(flag) if flag else None
        self._tell_process = tell_process

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"start": number} for number in range(2500)]

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self._random = random.Random(seed)
        self._count += task.get("start", 0)
        return self._see()

    def step(self, action: Action) -> StepResult:
        self._count += 1
        verb = action.text
        if verb == "hang":
            while True:
                pass
        if verb == "sleep":
            time.sleep(0.5)
        if verb == "die":
            os._exit(3)
        if verb == "die once" and self._flag is not None and not self._flag.exists():
            self._flag.touch()
            signal.raise_signal(signal.SIGSEGV)  # to this thread, as a fault would
        if verb == "exit":
            sys.exit("enough")
        if verb == "raise":
            raise RuntimeError("the goblin left")
        if verb == "nan":
            return StepResult(self._see(), reward=float("nan"))
        if verb == "print":
            print("hello from the environment")  # noqa: T201
        if verb == "fork":
            os.system("sleep 300 &")
        if verb == "daemon" and not os.fork():
            os.setsid()
            time.sleep(20)
            os._exit(0)
        if verb == "end":
            return StepResult(None, reward=float(self._count), terminated=True, info={"count": self._count})
        return StepResult(self._see(), reward=0.5)

    def metrics(self) -> dict[str, float]:
        return {"count": self._count}

    def _see(self) -> Observation:
        process = f" in {os.getpid()}" if self._tell_process else ""
        number = self._random.randrange(10**9)
        return Observation(f"count {self._count} of {number}{process}", info={"time": time.time()})


class Native(Counter):
    """Gives and takes its state."""

    def snapshot(self) -> dict[str, Any]:
        version, numbers, gauss = self._random.getstate()
        return {"count": self._count, "random": [version, list(numbers), gauss]}

    def restore(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["random"]
        self._count, self._random = state["count"], random.Random()
        self._random.setstate((version, tuple(numbers), gauss))


class WrongState(Native):
    """Its state is no JSON."""

    def snapshot(self) -> Any:
        return {"count": object()}


class Uncopyable(Counter):
    """Says that a copy does not hold it."""

    copyable: ClassVar[bool] = False


class Unpicklable(Counter):
    """Cannot be copied, which nobody knows before it is tried."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self._file = open("/dev/null")  # noqa: SIM115
        return super().reset(seed=seed, task=task)


class Forgetful(Counter):
    """Does not repeat itself, and does not say so."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return super().reset(seed=time.time_ns(), task=task)


class Honest(Forgetful):
    """Does not repeat itself, and says so."""

    deterministic: ClassVar[bool] = False


class HonestNative(Native):
    """Does not repeat itself, says so, and gives its state."""

    deterministic: ClassVar[bool] = False

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return super().reset(seed=time.time_ns(), task=task)


class HonestUncopyable(Honest):
    """Can be forked in no way."""

    copyable: ClassVar[bool] = False


class Waiting(Environment):
    """Waits without holding the process."""

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation("go")

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(float(action.text))
        return StepResult("slept", reward=1.0, truncated=True)


class Jam(Waiting):
    """Waits, or computes for ever without letting go of its event loop."""

    async def step(self, action: Action) -> StepResult:
        while action.text == "jam":
            pass
        if action.text.startswith("hold"):
            time.sleep(float(action.text.split()[1]))  # noqa: ASYNC251
            return StepResult("held")
        return await super().step(action)


class Blocking(Environment):
    """Blocks in `async` methods; tells on which loop."""

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return self._see()

    async def step(self, action: Action) -> StepResult:
        time.sleep(float(action.text))  # noqa: ASYNC251
        return StepResult(self._see())

    def _see(self) -> Observation:
        return Observation(str(id(asyncio.get_running_loop())))


class Rich(Environment):
    """Messages, images, legal actions, named reward parts."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation(
            messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        )

    def step(self, action: Action) -> StepResult:
        seen = Observation(["look", Image(b"\x89PNG" + bytes(1000))], legal_actions=["left", "right"])
        return StepResult(seen, reward=Reward(1.0, components={"style": 0.25, "truth": 0.75}))


class Large(Environment):
    """Answers of a megabyte, or as large as the action says."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation("x" * 1_000_000)

    def step(self, action: Action) -> StepResult:
        return StepResult("x" * int(action.text))


class Census(Counter):
    """Tells how many of it there are in its process."""

    living: ClassVar["weakref.WeakSet[Census]"] = weakref.WeakSet()

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        super().reset(seed=seed, task=task)
        Census.living.add(self)
        return Observation(f"{len(Census.living)} of us")


class Broken:
    """No environment at all."""
