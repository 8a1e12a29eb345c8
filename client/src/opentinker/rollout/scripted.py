"""Agents that are Python code of the user: opponents, simulated users, referees."""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Any

from opentinker.environments.daemon_threads import DaemonThreads
from opentinker.environments.rewards import Reward
from opentinker.environments.types import Action, EndReason, Observation
from opentinker.rollout.agent_loop import AgentStopped

Script = Callable[[Observation, random.Random], "str | Action | Awaitable[str | Action]"]
"""A move from what the agent sees, and randomness that depends on the run and the task only. Plain or
async; a class is made anew for each episode, so that it can remember."""

SCRIPT_TIMEOUT_S = 30.0

_THREADS = DaemonThreads()


class ScriptedAgent:
    """One agent of one episode, whose moves are a script's. What the script does wrong ends the episode as a
    crash of the environment would: it never becomes a reward.
    """

    def __init__(
        self, agent: str, script: Script | type, seed: int, timeout_s: float = SCRIPT_TIMEOUT_S
    ) -> None:
        self.agent = agent
        self.policy = script_name(script)
        self._script = script
        self._made: Any = None
        self._random = random.Random(seed)
        self._timeout_s = timeout_s
        self._seen: Observation | None = None

    def hear(self, observation: Observation) -> None:
        """Take what the agent sees."""
        self._seen = observation

    overhear = hear

    async def speak(self) -> Action:
        """Its move. AgentStopped if the script failed."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                # In a thread: it may search for long, and leases are renewed on this loop.
                value = await asyncio.wrap_future(_THREADS.submit(self._move))
                if isinstance(value, Awaitable):
                    value = await value
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"the script of {self.agent!r} did not answer within {self._timeout_s:g} s"
                raise AgentStopped(EndReason.STEP_TIMEOUT, text) from None
            text = f"the script of {self.agent!r} raised {type(error).__name__}: {error}"
            raise AgentStopped(EndReason.ENV_CRASH, text) from error
        if isinstance(value, str):
            return Action(value)
        if not isinstance(value, Action):
            text = f"the script of {self.agent!r} must give a text or an Action, not {type(value).__name__}"
            raise AgentStopped(EndReason.ENV_CRASH, text)
        return value

    def moved(self) -> None:
        """Nothing is kept of it."""

    def rewarded(self, reward: Reward) -> None:
        """It learns nothing."""

    @property
    def may_move(self) -> bool:
        """Limits are those of models."""
        return True

    def _move(self) -> Any:
        if self._made is None:
            self._made = self._script() if inspect.isclass(self._script) else self._script
        return self._made(self._seen, self._random)


def script_name(script: object) -> str:
    """What it is called in results."""
    return str(getattr(script, "__name__", type(script).__name__))
