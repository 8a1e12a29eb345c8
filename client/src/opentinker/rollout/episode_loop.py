"""Plays one episode: asks those whose move is pending, steps, hands out what came of it, until it is over.

An episode never raises for what a model, the environment or a server did to it: it ends with a reason, and
`EndReason.trainable` says whether it counts. For whom it is over before the others it ends with a reason
of his own, which counts unless the infrastructure ends the episode for all.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import replace
from typing import TypeVar

from opentinker import errors
from opentinker.environments.agents import JointStep, Observations
from opentinker.environments.rewards import Reward
from opentinker.environments.session import EnvironmentSession, end_reason_of
from opentinker.environments.types import Action, EndReason
from opentinker.rollout.agent_loop import AgentLoop, AgentStopped
from opentinker.rollout.limits import Limits
from opentinker.rollout.recorded_agent import RecordedAgent
from opentinker.rollout.scripted import ScriptedAgent
from opentinker.rollout.trajectory import Ended, Opponent, Trajectory
from opentinker.sampling.prompt import Prompt
from opentinkerapi.runtime.together import together

_R = TypeVar("_R")

Player = AgentLoop | RecordedAgent | ScriptedAgent

CLOSE_TIMEOUT_S = 15.0


class EpisodeLoop:
    """One episode and its players, one for each agent that the environment names."""

    def __init__(self, session: EnvironmentSession, players: Mapping[str, Player], limits: Limits) -> None:
        self._session = session
        self._players = players
        self._pending: Observations = {}
        self._seq = 0
        self._end: EndReason | None = None
        self._own_ends: dict[str, EndReason] = {}
        self._error = ""
        self._deadline = time.monotonic() + limits.wall_clock_s if limits.wall_clock_s else None
        self._waiting: asyncio.Timeout | None = None

    async def begin(self) -> Mapping[str, Prompt]:
        """The first prompts, of models that move first; none if the environment did not get that far."""
        observations = await self._guarded(self._session.begin_all())
        return {} if observations is None else self._hear(observations)

    def room(self, agent: str) -> int | None:
        """How many tokens the next move of an agent may have."""
        player = self._players[agent]
        return player.room() if isinstance(player, AgentLoop) else None

    async def play(self) -> tuple[Trajectory, ...]:
        """Go on to the end, and close the episode. What trained agents played, in the order of `players`."""
        try:
            while self._end is None:
                actions = await self._act()
                if actions is not None:
                    await self._interact(actions)
            return await self._finish()
        finally:
            await self._close()

    def cut(self) -> None:
        """End it now, as its deadline would."""
        self._deadline = time.monotonic()
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """TimeoutError at the deadline of the episode."""
        async with asyncio.timeout(self._seconds_left()) as waiting:
            self._waiting = waiting
            try:
                yield
            finally:
                self._waiting = None

    def _hear(self, observations: Observations) -> dict[str, Prompt]:
        self._pending = observations
        prompts = {}
        for name, observation in observations.items():
            prompt = self._players[name].hear(observation)
            if prompt is not None:
                prompts[name] = prompt
        return prompts

    async def _act(self) -> dict[str, Action] | None:
        """The moves of all whose move is pending, made at once; None if one of them makes none."""
        try:
            async with self._in_time():
                moves = await together(self._move(name) for name in self._pending)
        except TimeoutError:
            self._stop(EndReason.EPISODE_TIMEOUT)
            return None
        stopped = {name: move for name, move in moves if isinstance(move, AgentStopped)}
        if not stopped:
            return {name: move for name, move in moves if isinstance(move, Action)}
        worst = next((each for each in stopped.values() if not each.reason.trainable), None)
        if worst is not None:
            self._stop(worst.reason, worst.error)
        else:
            self._limited({name: each.reason for name, each in stopped.items()})
            self._error = next(iter(stopped.values())).error
        return None

    async def _move(self, name: str) -> tuple[str, Action | AgentStopped]:
        try:
            return name, await self._players[name].speak()
        except AgentStopped as stopped:
            return name, stopped

    async def _interact(self, actions: Mapping[str, Action]) -> None:
        for name in actions:
            self._players[name].moved()
        self._seq += 1
        result = await self._guarded(self._session.step_all(actions, self._seq))
        if result is None:
            return
        for name, reward in result.rewards.items():
            self._players[name].rewarded(reward)
        self._own_ends |= result.ended
        self._end = self._end_of(result)
        if self._end is None:
            self._hear(result.observations)
            return
        for name, observation in result.observations.items():
            self._players[name].overhear(observation)

    def _end_of(self, result: JointStep) -> EndReason | None:
        if result.terminated:
            return EndReason.TERMINATED
        if result.truncated:
            return EndReason.TRUNCATED
        spent = [name for name in result.observations if not self._players[name].may_move]
        self._limited(dict.fromkeys(spent, EndReason.TURN_LIMIT))
        return self._end

    def _limited(self, ends: Mapping[str, EndReason]) -> None:
        """Limits of agents end the episode: for them as the limit says, for others it is cut."""
        if ends:
            self._own_ends |= ends
            self._end = EndReason.TRUNCATED

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def _guarded(self, call: "Awaitable[_R]") -> "_R | None":
        """A call into the environment; None, and the episode is over, if it did not come back well."""
        try:
            async with self._in_time():
                return await call
        except errors.OpenTinkerError as error:
            reason = end_reason_of(error)
            if reason is None:
                if not isinstance(error, errors.Unavailable | errors.DeadlineExceeded | errors.InternalError):
                    raise
                reason = EndReason.SANDBOX_LOST
            self._stop(reason, str(error))
        except TimeoutError:
            self._stop(EndReason.EPISODE_TIMEOUT)
        return None

    def _stop(self, reason: EndReason, error: str = "") -> None:
        self._end = reason
        self._error = error

    async def _finish(self) -> tuple[Trajectory, ...]:
        assert self._end is not None
        await self._collect()
        ended = Ended(self._end, error=self._error)
        if self._end.trainable and self._seq:
            result = await self._guarded(self._session.finalize_all())
            if result is not None:
                ended = replace(ended, rewards=result.rewards, metrics=dict(result.metrics))
            ended = replace(ended, reason=self._end, error=self._error)
        return tuple(
            player.finish(self._session, self._for(player, ended))
            for player in self._players.values()
            if isinstance(player, AgentLoop | RecordedAgent) and player.trained
        )

    async def _collect(self) -> None:
        """Fetch what was recorded elsewhere, and with it what ended the episode there."""
        for name, player in self._players.items():
            if isinstance(player, RecordedAgent):
                stopped = await player.collect()
                if stopped is not None and not stopped.reason.trainable:
                    self._stop(stopped.reason, stopped.error)
                elif stopped is not None and self._end is EndReason.TRUNCATED:
                    self._own_ends[name] = stopped.reason

    def _for(self, player: Player, ended: Ended) -> Ended:
        """How it ended for one agent."""
        own = self._own_ends.get(player.agent)
        others = {
            other.agent: Opponent(other.policy, ended.rewards.get(other.agent, Reward.unscored()).value)
            for other in self._players.values()
            if other is not player
        }
        reason = own if own is not None and ended.reason.trainable else ended.reason
        return replace(ended, reason=reason, opponents=others)

    async def _close(self) -> None:
        for player in self._players.values():
            if isinstance(player, RecordedAgent):
                # First: what an agent is still saying to its model ends with this.
                await player.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._session.close()
        except (errors.OpenTinkerError, TimeoutError):
            # What an episode holds is freed by its lease.
            return
