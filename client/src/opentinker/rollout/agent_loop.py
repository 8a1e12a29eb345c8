"""The agent loop: one state machine for single-turn and multi-turn episodes, one per agent per episode.

    PENDING -> GENERATING -> INTERACTING -> (GENERATING ...) -> TERMINATED

Token in, token out: what was sampled is what is trained on. An episode never raises for what the model, the
environment or a server did to it: it ends with a reason, and `EndReason.trainable` says whether it counts.
What raises is a fault of the caller (a model that is not there, an option that is refused).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeVar

import numpy as np

from opentinker import errors
from opentinker.environments.content import Message
from opentinker.environments.rewards import Reward, RewardSum
from opentinker.environments.session import EnvironmentSession, end_reason_of
from opentinker.environments.types import Action, EndReason, StepResult
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.trajectory import Segment, Trajectory, Turn
from opentinker.sampling.completion import Completion, StopReason
from opentinker.sampling.prompt import Prompt, images_of
from opentinker.sampling.support import Support

_R = TypeVar("_R")

Generate = Callable[[int, Sequence[int], int], Awaitable[Completion]]
"""Samples the action of a turn (0, 1, 2 ...) after a prompt, with at most so many new tokens."""

CLOSE_TIMEOUT_S = 15.0


class LoopState(Enum):
    """Where an episode stands."""

    PENDING = "pending"
    GENERATING = "generating"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class _Tokens:
    """A segment that grows."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = list(prompt)
        self.images = list(images_of(prompt))
        self.mask = [0] * len(prompt)
        self.logprobs: list[float] = [0.0] * len(prompt)
        self.spans: list[tuple[int, int, int]] = []
        self.supports: list[tuple[int, Support]] = []

    def sampled(self, completion: Completion, version: int) -> None:
        """Append what the policy said."""
        start = len(self.ids)
        spans = completion.spans or ((0, len(completion.token_ids), version),)
        self.spans += [(start + first, start + last, number) for first, last, number in spans]
        if completion.support is not None:
            self.supports.append((start, completion.support))
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()

    def observed(self, ids: Sequence[int]) -> None:
        """Append what the environment said."""
        self.images += [image.shifted(len(self.ids)) for image in images_of(ids)]
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def prompt(self) -> Prompt:
        """All of it so far, to be continued."""
        return Prompt(self.ids, self.images)

    def freeze(self) -> Segment:
        """Cut off what nobody spoke after: it trains nothing."""
        end = len(self.mask) - next((i for i, bit in enumerate(reversed(self.mask)) if bit), len(self.mask))
        return Segment(
            tuple(self.ids[:end]),
            tuple(self.mask[:end]),
            np.asarray(self.logprobs[:end], dtype=np.float32),
            tuple(self.spans),
            tuple(image for image in self.images if image.end <= end),
            Support.joined(self.supports, end),
        )


class AgentLoop:
    """Plays one episode of one agent."""

    def __init__(
        self,
        session: EnvironmentSession,
        renderer: Renderer,
        generate: Generate,
        *,
        group: str,
        member: int,
        version: int,
        limits: Limits,
        max_tokens: int | None,
        context_tokens: int,
        temperature: float,
    ) -> None:
        self.state = LoopState.PENDING
        self._session = session
        self._renderer = renderer
        self._generate = generate
        self._group = group
        self._member = member
        self._version = version
        self._limits = limits
        self._max_tokens = max_tokens
        self._context_tokens = context_tokens
        self._temperature = temperature
        self._messages: list[Message] = []
        self._tokens = _Tokens([])
        self._closed_segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._rewards = RewardSum()
        self._end: EndReason | None = None
        self._error = ""
        self._deadline = time.monotonic() + limits.wall_clock_s if limits.wall_clock_s else None

    async def begin(self) -> Prompt | None:
        """The first prompt; None if the environment did not get that far."""
        observation = await self._guarded(self._session.begin())
        if observation is None:
            return None
        self._messages += observation.as_messages()
        self._tokens = _Tokens(self._renderer.first(self._messages))
        self.state = LoopState.GENERATING
        return self._tokens.prompt()

    async def play(self) -> Trajectory:
        """Go on to the end, and close the episode."""
        try:
            while self._end is None:
                completion = await self._act()
                if completion is not None:
                    await self._interact(completion)
            return await self._finish()
        finally:
            self.state = LoopState.TERMINATED
            await self._close()

    async def _act(self) -> Completion | None:
        self.state = LoopState.GENERATING
        room = self.room()
        if room is not None and room < 1:
            self._stop(EndReason.TOKEN_LIMIT)
            return None
        try:
            async with asyncio.timeout(self._seconds_left()):
                return await self._generate(len(self._turns), self._tokens.prompt(), room or 0)
        except TimeoutError:
            self._stop(EndReason.EPISODE_TIMEOUT)
        except errors.PromptTooLong as error:
            if not self._turns:
                # The task itself does not fit: training would go on without it, silently. Not here.
                raise
            self._stop(EndReason.TOKEN_LIMIT, error.message)
        except (errors.InternalError, errors.Aborted) as error:
            if isinstance(error, errors.JobEnded):
                raise
            self._stop(EndReason.CANCELLED, str(error))
        return None

    async def _interact(self, completion: Completion) -> None:
        self.state = LoopState.INTERACTING
        if completion.stop_reason is StopReason.CANCELLED:
            self._stop(EndReason.CANCELLED, "the completion was cancelled")
            return
        prompt_tokens = len(self._tokens.ids)
        self._tokens.sampled(completion, self._version)
        action = Action(completion.text)
        result = await self._guarded(self._session.step(action, len(self._turns) + 1))
        reward = result.reward.value if result is not None else None
        self._turns.append(
            Turn(prompt_tokens, len(completion.token_ids), completion.text, completion.stop_reason, reward)
        )
        if result is None:
            return
        self._rewards.add(result.reward)
        before = tuple(self._messages)
        self._messages.append(Message("assistant", completion.text))
        self._end = self._end_of(result)
        if result.observation is not None:
            added = result.observation.as_messages()
            self._messages += added
            if self._end is None:
                self._follow(before, completion, added)

    def _follow(self, before: Sequence[Message], completion: Completion, added: Sequence[Message]) -> None:
        rest = self._renderer.follow(before, completion.text, completion.token_ids, added)
        if rest is not None:
            self._tokens.observed(rest)
            return
        self._closed_segments.append(self._tokens.freeze())
        self._tokens = _Tokens(self._renderer.first(self._messages))

    def _end_of(self, result: StepResult) -> EndReason | None:
        if result.terminated:
            return EndReason.TERMINATED
        if result.truncated:
            return EndReason.TRUNCATED
        if self._limits.turns is not None and len(self._turns) >= self._limits.turns:
            return EndReason.TURN_LIMIT
        return None

    def room(self) -> int | None:
        """How many tokens the next action may have; None: whatever the context leaves."""
        rooms = []
        if self._max_tokens is not None:
            rooms.append(self._max_tokens)
        if self._limits.tokens_per_episode is not None:
            rooms.append(self._limits.tokens_per_episode - len(self._tokens.ids))
        if self._context_tokens and self._turns:
            rooms.append(self._context_tokens - len(self._tokens.ids))
        return min(rooms) if rooms else None

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    async def _guarded(self, call: "Awaitable[_R]") -> "_R | None":
        """A call into the environment; None, and the episode is over, if it did not come back well."""
        try:
            async with asyncio.timeout(self._seconds_left()):
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

    async def _finish(self) -> Trajectory:
        reward, metrics = self._rewards.total, {}
        assert self._end is not None
        end = self._end
        if end.trainable and self._turns:
            result = await self._guarded(self._session.finalize())
            if result is not None:
                reward, metrics = result.reward, dict(result.metrics)
            end = self._end
        if not end.trainable:
            reward = Reward.unscored()
        segments = [*self._closed_segments, self._tokens.freeze()]
        return Trajectory(
            group=self._group,
            member=self._member,
            episode=self._session.episode,
            segments=tuple(segment for segment in segments if any(segment.loss_mask)),
            turns=tuple(self._turns),
            reward=reward,
            end_reason=end,
            temperature=self._temperature,
            messages=tuple(self._messages),
            metrics=metrics,
            env_seconds=self._session.env_seconds,
            replays=self._session.replays,
            error=self._error,
        )

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._session.close()
        except (errors.OpenTinkerError, TimeoutError):
            # What an episode holds is freed by its lease.
            return
