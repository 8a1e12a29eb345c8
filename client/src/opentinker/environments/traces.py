"""One episode played for the record: what it answered, as digests, and how long that took."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from opentinker.environments import codec
from opentinker.environments.agents import Observations
from opentinker.environments.base import EnvironmentClass, has_snapshots
from opentinker.environments.daemon_threads import DaemonThreads
from opentinker.environments.runner import EnvironmentRaised, Runner, call_directly
from opentinker.environments.types import Action

DEFAULT_ACTIONS = ("5", "12", "1", "50", "", "yes", '{"answer": 1}', "I do not know.")
_THREADS = DaemonThreads()


@dataclass(frozen=True, slots=True)
class Play:
    """How episodes are played."""

    task: Mapping[str, Any]
    actions: tuple[str, ...]
    """What agents say in turn, where the environment lists no legal actions."""
    steps: int
    timeout_s: float


@dataclass(slots=True)
class Trace:
    """What an episode answered."""

    digests: list[str] = field(default_factory=list)
    """Of the first observation and of each step."""
    reset_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    error: str = ""
    """What it raised; it ended there."""
    ended: bool = False
    """The environment ended it."""
    status: str = ""
    """Of the first agent's return."""


class Episode:
    """Plays move by move. Nothing that the environment raises comes out of it."""

    def __init__(self, cls: EnvironmentClass, options: Mapping[str, Any], seed: int, play: Play) -> None:
        self.trace = Trace()
        self._cls = cls
        self._options = options
        self._play = play
        self._seed = seed
        # The same for every seed: what differs then is the environment's doing.
        self._random = random.Random("probe")
        self._runner = Runner(cls, options, self._invoke)
        self._pending: Observations | None = None

    async def move(self) -> bool:
        """Reset it, or make the next step; False once it is over or has been played for long enough."""
        trace = self.trace
        if trace.error or trace.ended or len(trace.step_s) >= self._play.steps:
            return False
        began = time.perf_counter()
        blobs: list[bytes] = []
        try:
            if self._pending is None:
                self._pending = await self._runner.begin(self._seed, self._play.task)
                trace.reset_s = time.perf_counter() - began
                plain = {"observations": codec.plain_observations(self._pending, blobs)}
            else:
                step = await self._runner.step(self._actions(self._pending))
                trace.step_s.append(time.perf_counter() - began)
                self._pending, trace.ended = step.observations, step.done
                plain = codec.plain_step(step, blobs)
        except EnvironmentRaised as raised:
            trace.error = raised.text
            return False
        trace.digests.append(codec.digest(plain, blobs))
        return True

    async def end(self) -> Trace:
        """Close it; what it came to."""
        trace = self.trace
        try:
            if self._pending is not None and not trace.error:
                result = await self._runner.finalize()
                trace.status = str(next(iter(result.rewards.values())).status)
            await self._runner.close()
        except EnvironmentRaised as raised:
            trace.error = trace.error or raised.text
        return trace

    async def fork(self) -> "Episode":
        """Another one at the same place, by the environment's own methods or as a copy. Raises what they
        raise.
        """
        play = replace(self._play)
        made = Episode(self._cls, self._options, self._seed, play)
        if has_snapshots(self._cls):
            await made._runner.go_on_from(json.loads(json.dumps(await self._runner.state())))
        else:
            made._runner = self._runner.copy()
        made._pending, made.trace = self._pending, deepcopy(self.trace)
        made._random.setstate(self._random.getstate())
        return made

    def _actions(self, pending: Observations) -> dict[str, Action]:
        said = self._play.actions[len(self.trace.step_s) % len(self._play.actions)]
        return {
            name: Action(self._random.choice(seen.legal_actions) if seen.legal_actions else said)
            for name, seen in pending.items()
        }

    async def _invoke(self, method: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(self._play.timeout_s) as deadline:
                value = await asyncio.wrap_future(_THREADS.submit(method))
                return await call_directly(lambda: value)
        except TimeoutError:
            if deadline.expired():
                raise TimeoutError(f"no answer within {self._play.timeout_s:g} s") from None
            raise  # the environment's own


def first_difference(one: Trace, other: Trace) -> str:
    """Where two traces part, in words; empty if they do not."""
    for place, (left, right) in enumerate(zip(one.digests, other.digests, strict=False)):
        if left != right:
            return f"step {place} came out differently" if place else "the first observation differs"
    if len(one.digests) != len(other.digests) or one.ended != other.ended:
        return f"one episode has {len(one.digests)} answers and the other {len(other.digests)}"
    if one.error != other.error:
        return f"only one raised, or each another error: {one.error or other.error}"
    return "its return differs" if one.status != other.status else ""
