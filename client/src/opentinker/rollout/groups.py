"""Plays one group: G episodes of one task, and the requests that sample for them.

Where the first prompts of the members are equal they are one request with n = G, so that the engine reads
the prompt once; completion i is member i's. Every later turn is a request of its own. Names and seeds
depend on the run, the task's ordinal, the turn and the member only, so they are the same however the
requests were grouped and however often they had to be sent.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from opentinker import errors
from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSource
from opentinker.rollout.agent_loop import AgentLoop
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Group, Trajectory
from opentinker.sampling import identity
from opentinker.sampling.completion import Completion
from opentinker.sampling.meter import EngineMeter
from opentinker.sampling.params import SamplingParams
from opentinker.sampling.prompt import Prompt
from opentinker.sampling.sampler import CompletionSource
from opentinkerapi.runtime.together import together


@dataclass(frozen=True, slots=True)
class Setting:
    """What all groups of a rollout have in common."""

    sampler: CompletionSource
    renderer: Renderer
    source: EnvironmentSource
    params: SamplingParams
    limits: Limits
    context_tokens: int
    group_size: int
    seed: int
    """The run's; sampling and environment seeds derive from it."""
    scope: str
    """Makes request ids of this rollout differ from any other's: the run, or a fresh name."""


@dataclass(frozen=True, slots=True)
class Play:
    """One group to play: the `ordinal`-th task of the run, sampled at a version."""

    ordinal: int
    task: Task
    version: int


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
        self._shared: list[asyncio.Future[Completion]] = []
        self._conversation = f"{setting.scope}/{play.ordinal}"
        self.request_ids: list[str] = []
        """Of every completion asked for, to be acknowledged at the end."""

    async def play(self) -> Group:
        """All members, in order. Raises what is a fault of the caller, never what befell an episode."""
        left = self._setting.group_size

        async def to_the_end(loop: AgentLoop) -> Trajectory:
            nonlocal left
            try:
                return await loop.play()
            finally:
                left -= 1
                self._on_end()

        try:
            return await self._play_all(to_the_end)
        finally:
            for _ in range(left):
                self._on_end()

    async def _play_all(self, to_the_end: Callable[[AgentLoop], Coroutine[Any, Any, Trajectory]]) -> Group:
        setting, play = self._setting, self._play
        env_seed = identity.seed(setting.seed, "environment", play.ordinal)
        sessions = await setting.source.open_group(task=play.task, seed=env_seed, size=setting.group_size)
        loops = [
            AgentLoop(
                session,
                setting.renderer,
                partial(self._generate, member),
                group=self._id,
                member=member,
                version=play.version,
                limits=setting.limits,
                max_tokens=setting.params.max_tokens,
                context_tokens=setting.context_tokens,
                temperature=setting.params.temperature,
            )
            for member, session in enumerate(sessions)
        ]
        try:
            prompts = await together(loop.begin() for loop in loops)
            async with self._first_turn(prompts, loops[0].room()):
                trajectories = await together(to_the_end(loop) for loop in loops)
        except BaseException:
            # Those that had not begun to play hold their episodes still.
            await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)
            raise
        return Group(self._id, play.ordinal, play.task, env_seed, tuple(trajectories))

    @contextlib.asynccontextmanager
    async def _first_turn(self, prompts: Sequence[Prompt | None], room: int | None) -> AsyncIterator[None]:
        """One request for the first turn of all members, if they see the same."""
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        if prompt is None or len(prompts) < 2 or any(other not in (None, prompt) for other in prompts):
            yield
            return
        loop = asyncio.get_running_loop()
        self._shared = [loop.create_future() for _ in prompts]
        sampling = asyncio.create_task(self._sample_shared(prompt, room or 0))
        try:
            yield
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    async def _sample_shared(self, prompt: Prompt, room: int) -> None:
        """Hand out the completions of the first turn as they finish; no member waits for another."""
        try:
            async for completion in self._sample(prompt, room, member=0, turn=0, n=len(self._shared)):
                self._shared[completion.index].set_result(completion)
        except Exception as error:
            for future in self._shared:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # members that died before their first turn never ask

    async def _generate(self, member: int, turn: int, prompt: Sequence[int], room: int) -> Completion:
        """The action of a member's turn."""
        if turn == 0 and self._shared:
            return await asyncio.shield(self._shared[member])
        async with contextlib.aclosing(
            self._sample(prompt, room, member=member, turn=turn, n=1)
        ) as completions:
            async for completion in completions:
                return completion
        raise errors.InternalError("a Sample ended without a completion", reason=errors.Reason.INTERNAL)

    async def _sample(
        self, prompt: Sequence[int], room: int, *, member: int, turn: int, n: int
    ) -> AsyncGenerator[Completion, None]:
        setting, ordinal = self._setting, self._play.ordinal
        # Members with the same first prompt stay where it was read.
        conversation = self._conversation if self._shared else f"{self._conversation}/{member}"
        request_id = identity.request_id(
            "sample", setting.scope, setting.seed, self._play.version, ordinal, member, turn
        )
        params = replace(setting.params, max_tokens=room) if room else setting.params
        completions = setting.sampler.sample(
            prompt,
            version=self._play.version,
            params=params,
            n=n,
            seed=identity.seed(setting.seed, "sampling", ordinal, turn) + member,
            request_id=request_id,
            meter=self._meter,
            conversation=conversation,
        )
        self.request_ids.append(request_id)
        async with contextlib.aclosing(completions):
            async for completion in completions:
                yield completion
