"""An environment that holds something frees it however its episode ended."""

import asyncio
import threading
from typing import Any, ClassVar

import pytest

from opentinker.environments import (
    Action,
    Environment,
    Observation,
    StepResult,
    environment_source,
)
from opentinker.environments.session import EnvironmentSession
from opentinker_kit.testing import wait_until
from opentinkerapi.runtime.errors import EnvironmentCrashed, StepTimeout


class Holder(Environment):
    """Counts how often it was closed, and from where."""

    closed: ClassVar[list[str]] = []
    go_on: ClassVar[threading.Event] = threading.Event()

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self.inside = False
        return Observation("go")

    def step(self, action: Action) -> StepResult:
        if action.text == "raise":
            raise KeyError("lost")
        self.inside = True
        self.go_on.wait(20)
        self.inside = False
        return StepResult("on")

    def close(self) -> None:
        self.closed.append("inside" if self.inside else "outside")
        raise RuntimeError("what close raises changes nothing")


class AsyncHolder(Environment):
    closed: ClassVar[list[str]] = []

    async def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return Observation("go")

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(60)
        return StepResult("on")

    async def close(self) -> None:
        self.closed.append("outside")


@pytest.fixture(autouse=True)
def fresh() -> None:
    Holder.closed.clear()
    AsyncHolder.closed.clear()
    Holder.go_on.clear()


async def begun(env: type[Environment]) -> EnvironmentSession:
    source = await environment_source(env, step_timeout_s=0.2)
    (session,) = await source.open_group(task={}, seed=0, size=1)
    await session.begin()
    return session


async def test_after_a_crash() -> None:
    session = await begun(Holder)
    with pytest.raises(EnvironmentCrashed):
        await session.step(Action("raise"), 1)
    await session.close()
    await session.close()
    assert Holder.closed == ["outside"]
    with pytest.raises(EnvironmentCrashed, match="lost"):
        await session.finalize()


async def test_after_a_deadline_once_the_step_returns() -> None:
    session = await begun(Holder)
    with pytest.raises(StepTimeout):
        await session.step(Action("wait"), 1)
    await session.close()
    assert Holder.closed == []
    Holder.go_on.set()
    await wait_until(lambda: Holder.closed == ["outside"], what="it is closed")


async def test_after_a_deadline_of_an_async_step() -> None:
    session = await begun(AsyncHolder)
    with pytest.raises(StepTimeout):
        await session.step(Action("wait"), 1)
    await session.close()
    assert AsyncHolder.closed == ["outside"]
