"""Plays one group: G episodes of one task, and the requests that sample for them.

Where the first prompts of an agent are equal in all members they are one request with n = G, so that the
engine reads the prompt once; completion i is member i's. Every later turn is a request of its own. Names
and seeds depend on the run, the task's ordinal, the agent, its turn and the member only, so they are the
same however the requests were grouped and however often they had to be sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from opentinker import errors
from opentinker.environments.base import Task
from opentinker.environments.session import EnvironmentSession
from opentinker.environments.sources import EnvironmentSource
from opentinker.environments.types import AGENT
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.cast import Cast, Voice
from opentinker.rollout.episode_loop import EpisodeLoop, Player
from opentinker.rollout.limits import Limits
from opentinker.rollout.recorded_agent import RecordedAgent
from opentinker.rollout.scripted import ScriptedAgent
from opentinker.rollout.trajectory import Group, Trajectory
from opentinker.sampling import identity
from opentinker.sampling.completion import Completion
from opentinker.sampling.meter import EngineMeter
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.prompt import Prompt
from opentinker.sampling.sampler import Sampler
from opentinkerapi.runtime.together import together


@dataclass(frozen=True, slots=True)
class Setting:
    """What all groups of a rollout have in common."""

    source: EnvironmentSource
    params: SamplingParams
    limits: Limits
    group_size: int
    seed: int
    """The run's; sampling and environment seeds derive from it."""
    scope: str
    """Makes request ids of this rollout differ from any other's: the run, or a fresh name."""


@dataclass(frozen=True, slots=True)
class Play:
    """One group to play: the `ordinal`-th task of the run, and who plays its agents."""

    ordinal: int
    task: Task
    cast: Cast


@dataclass(frozen=True, slots=True)
class _Shared:
    """The first turn of an agent, asked for once for all members."""

    prompt: Prompt
    room: int
    completions: Sequence[asyncio.Future[Completion]]


class GroupPlayer:
    """Plays one group."""

    def __init__(
        self, setting: Setting, play: Play, meter: EngineMeter, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """`on_end` is called once for each member, when its episode is over or will never be played."""
        self._setting = setting
        self._on_end = on_end
        self._play = play
        self._meter = meter
        self._id = f"{setting.source.info.name}/{play.ordinal}"
        self._shared: dict[str, _Shared] = {}
        self._conversation = f"{setting.scope}/{play.ordinal}"
        self._loops: list[EpisodeLoop] = []
        self.ended = 0
        """Members whose episodes are over."""
        self.was_cut = False
        self.requests: list[tuple[Sampler, str]] = []
        """Every completion that was asked for, to be acknowledged at the end."""

    async def play(self) -> Group:
        """All members, in order. Raises what is a fault of the caller, never what befell an episode."""
        left = self._setting.group_size

        async def to_the_end(loop: EpisodeLoop) -> tuple[Trajectory, ...]:
            nonlocal left
            try:
                return await loop.play()
            finally:
                left -= 1
                self.ended += 1
                self._on_end()

        try:
            return await self._play_all(to_the_end)
        finally:
            # What was said lives on in the group alone.
            self._loops, self._shared = [], {}
            for _ in range(left):
                self._on_end()

    def cut(self) -> None:
        """End the episodes that go on: those that have ended are the group."""
        self.was_cut = True
        for loop in self._loops:
            loop.cut()

    async def _play_all(
        self, to_the_end: Callable[[EpisodeLoop], Coroutine[Any, Any, tuple[Trajectory, ...]]]
    ) -> Group:
        setting, play = self._setting, self._play
        env_seed = identity.seed(setting.seed, "environment", play.ordinal)
        sessions = await setting.source.open_group(task=play.task, seed=env_seed, size=setting.group_size)
        try:
            loops = [self._episode(member, session) for member, session in enumerate(sessions)]
            self._loops = loops
            prompts = await together(loop.begin() for loop in loops)
            async with self._first_turns(loops, prompts):
                played = await together(to_the_end(loop) for loop in loops)
        except BaseException:
            # Those that had not begun to play hold their episodes still.
            await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
            raise
        trajectories = tuple(trajectory for member in played for trajectory in member)
        return Group(self._id, play.ordinal, play.task, env_seed, trajectories)

    def _episode(self, member: int, session: EnvironmentSession) -> EpisodeLoop:
        players = {agent: self._player(member, agent) for agent in self._play.cast}
        return EpisodeLoop(session, players, self._setting.limits)

    def _player(self, member: int, agent: str) -> Player:
        setting, voice = self._setting, self._play.cast[agent]
        if isinstance(voice, Voice) and setting.source.info.run_timeout_s:
            return RecordedAgent(
                voice,
                setting.params,
                setting.limits,
                group=self._id,
                member=member,
                seed=identity.seed(setting.seed, "sampling", self._play.ordinal) + member,
                agent=agent,
            )
        if not isinstance(voice, Voice):
            return ScriptedAgent(
                agent, voice, identity.seed(setting.seed, "script", self._play.ordinal, agent)
            )
        return AgentLoop(
            voice.renderer,
            partial(self._generate, voice, agent, member),
            # An agent is compared with itself in the other members: what another one plays is another game.
            group=self._id if agent == AGENT else f"{self._id}/{agent}",
            member=member,
            version=voice.version,
            limits=setting.limits,
            max_tokens=setting.params.max_tokens,
            context_tokens=voice.context_tokens,
            temperature=setting.params.temperature,
            agent=agent,
            policy=voice.policy,
            trained=voice.trained,
        )

    @contextlib.asynccontextmanager
    async def _first_turns(
        self, loops: Sequence[EpisodeLoop], prompts: Sequence[Mapping[str, Prompt]]
    ) -> AsyncIterator[None]:
        """One request for the first turn of an agent in all members, if they see the same."""
        # A member without prompts did not get that far; it never asks.
        begun = [(loop, each) for loop, each in zip(loops, prompts, strict=True) if each]
        loop = asyncio.get_running_loop()
        sampling = []
        for agent, prompt in begun[0][1].items() if begun and len(prompts) > 1 else ():
            voice, room = self._play.cast[agent], begun[0][0].room(agent)
            alike = all(each.get(agent) == prompt for _, each in begun)
            if not isinstance(voice, Voice) or not alike or (room is not None and room < 1):
                continue
            shared = _Shared(prompt, room or 0, [loop.create_future() for _ in prompts])
            self._shared[agent] = shared
            sampling.append(asyncio.create_task(self._sample_shared(voice, agent, shared)))
        try:
            yield
        finally:
            for task in sampling:
                task.cancel()
            await asyncio.gather(*sampling, return_exceptions=True)

    async def _sample_shared(self, voice: Voice, agent: str, shared: _Shared) -> None:
        """Hand out the completions of the first turn as they finish; no member waits for another."""
        try:
            completions = self._sample(
                voice, agent, shared.prompt, shared.room, member=0, turn=0, n=len(shared.completions)
            )
            async for completion in completions:
                shared.completions[completion.index].set_result(completion)
        except Exception as error:
            for future in shared.completions:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # members that died before their first turn never ask

    async def _generate(
        self, voice: Voice, agent: str, member: int, turn: int, prompt: Sequence[int], room: int
    ) -> Completion:
        """The action of a member's turn."""
        shared = self._shared.get(agent)
        if turn == 0 and shared is not None and shared.prompt == prompt:
            return await asyncio.shield(shared.completions[member])
        async with contextlib.aclosing(
            self._sample(voice, agent, prompt, room, member=member, turn=turn, n=1)
        ) as completions:
            async for completion in completions:
                return completion
        raise errors.InternalError("a Sample ended without a completion", reason=errors.Reason.INTERNAL)

    async def _sample(
        self,
        voice: Voice,
        agent: str,
        prompt: Sequence[int],
        room: int,
        *,
        member: int,
        turn: int,
        n: int,
    ) -> AsyncGenerator[Completion, None]:
        setting, ordinal = self._setting, self._play.ordinal
        # Members with the same first prompt stay where it was read.
        conversation = self._conversation if agent in self._shared else f"{self._conversation}/{member}"
        named: tuple[str, ...] = () if agent == AGENT else (agent, voice.policy)
        request_id = identity.request_id(
            "sample", setting.scope, setting.seed, voice.version, ordinal, member, turn, *named
        )
        params = replace(setting.params, max_tokens=room) if room else setting.params
        completions = voice.sampler.sample(
            prompt,
            version=voice.version,
            params=params,
            n=n,
            seed=identity.seed(setting.seed, "sampling", ordinal, turn, *named[:1]) + member,
            request_id=request_id,
            meter=self._meter,
            conversation="/".join((conversation, *named[:1])),
        )
        self.requests.append((voice.sampler, request_id))
        async with contextlib.aclosing(completions):
            async for completion in completions:
                yield completion
