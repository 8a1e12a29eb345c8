"""The agent loop: one state machine for single-turn and multi-turn episodes, one per agent per episode.

    PENDING -> GENERATING -> INTERACTING -> (GENERATING ...) -> TERMINATED

Token in, token out: what was sampled is what is trained on. An agent hears what it sees (`hear`), is asked
for its move (`speak`), and is told that the move was made (`moved`) and what it brought (`rewarded`);
whose turn it is, `episode_loop` knows. What stops it (no room for another token, an engine that failed) is
an `AgentStopped`; what else raises is a fault of the caller (a model that is not there, an option that is
refused).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum

from opentinker import errors
from opentinker.environments.content import Message
from opentinker.environments.rewards import Reward, RewardSum
from opentinker.environments.session import EnvironmentSession
from opentinker.environments.types import AGENT, Action, EndReason, Observation
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.tokens import Tokens
from opentinker.rollout.tool_calls import Parsed
from opentinker.rollout.trajectory import Ended, Segment, Trajectory, Turn
from opentinker.sampling.completion import Completion, StopReason
from opentinker.sampling.prompt import Prompt

Generate = Callable[[int, Sequence[int], int], Awaitable[Completion]]
"""Samples the action of a turn (0, 1, 2 ...) after a prompt, with at most so many new tokens."""


class LoopState(Enum):
    """Where an agent stands."""

    PENDING = "pending"
    GENERATING = "generating"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentStopped(Exception):
    """The agent makes no further move."""

    def __init__(self, reason: EndReason, error: str = "") -> None:
        super().__init__(error or reason)
        self.reason = reason
        self.error = error


class AgentLoop:
    """One agent of one episode, whose moves are sampled."""

    def __init__(
        self,
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
        agent: str = AGENT,
        policy: str = "",
        trained: bool = True,
    ) -> None:
        self.state = LoopState.PENDING
        self.agent = agent
        self.policy = policy
        self.trained = trained
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
        self._tokens = Tokens([])
        self._closed_segments: list[Segment] = []
        self._turns: list[Turn] = []
        self._rewards = RewardSum()
        self._legal: tuple[str, ...] = ()
        self._tool_calls = 0
        self._malformed = 0
        self._illegal = 0
        self._said: Completion | None = None
        self._answered: tuple[tuple[Message, ...], Completion] | None = None
        """The last move and the conversation that led to it, until something follows it."""

    def hear(self, observation: Observation) -> Prompt:
        """Take what the agent sees; the prompt of its move."""
        self._legal = observation.legal_actions
        return self._listen(observation.as_messages())

    def _listen(self, added: Sequence[Message]) -> Prompt:
        self.state = LoopState.GENERATING
        self._messages += added
        if self._answered is None:
            self._tokens = Tokens(self._renderer.first(self._messages))
            return self._tokens.prompt()
        before, completion = self._answered
        rest = self._renderer.follow(before, completion.text, completion.token_ids, added)
        if rest is not None:
            self._tokens.observed(rest)
        else:
            self._closed_segments.append(self._tokens.freeze())
            self._tokens = Tokens(self._renderer.first(self._messages))
        return self._tokens.prompt()

    def overhear(self, observation: Observation) -> None:
        """Take what it sees at the end, after which it makes no move."""
        self._messages += observation.as_messages()

    async def speak(self) -> Action:
        """Its move. What cannot be one is told to it, and it tries again. AgentStopped if it makes none."""
        while True:
            completion = await self._sample()
            self._said = completion
            heard = self._renderer.parse(completion.text)
            told = self._malformed_calls(heard) or self._illegal_action(heard)
            if told is None:
                self._tool_calls += len(heard.tool_calls)
                if self._limits.tool_calls is not None and self._tool_calls > self._limits.tool_calls:
                    self.moved()
                    raise AgentStopped(EndReason.TOOL_LIMIT)
                return Action(heard.text, heard.tool_calls)
            self.moved()
            if self._too_many():
                raise AgentStopped(EndReason.PARSE_ERROR_LIMIT)
            if not self.may_move:
                raise AgentStopped(EndReason.TURN_LIMIT)
            self._listen((told,))

    def _malformed_calls(self, heard: Parsed) -> Message | None:
        """What to tell an agent whose tool calls cannot be read."""
        if not heard.problems:
            return None
        self._malformed += len(heard.problems)
        return Message("tool", "\n".join(heard.problems))

    def _illegal_action(self, heard: Parsed) -> Message | None:
        """What to tell an agent whose action is not allowed, where it may try again."""
        if not self._legal or heard.tool_calls or heard.text.strip() in self._legal:
            return None
        self._illegal += 1
        if self._limits.illegal_actions is None:
            return None
        return Message("user", f"That is not allowed. Allowed actions: {', '.join(self._legal)}")

    def _too_many(self) -> bool:
        counts = ((self._malformed, self._limits.parse_errors), (self._illegal, self._limits.illegal_actions))
        return any(most is not None and count > most for count, most in counts)

    async def _sample(self) -> Completion:
        room = self.room()
        if room is not None and room < 1:
            raise AgentStopped(EndReason.TOKEN_LIMIT)
        try:
            completion = await self._generate(len(self._turns), self._tokens.prompt(), room or 0)
        except errors.PromptTooLong as error:
            if not self._turns:
                # The task itself does not fit: training would go on without it, silently. Not here.
                raise
            raise AgentStopped(EndReason.TOKEN_LIMIT, error.message) from error
        except (errors.InternalError, errors.Aborted) as error:
            if isinstance(error, errors.JobEnded):
                raise
            raise AgentStopped(EndReason.CANCELLED, str(error)) from error
        if completion.stop_reason is StopReason.CANCELLED:
            raise AgentStopped(EndReason.CANCELLED, "the completion was cancelled")
        return completion

    def moved(self) -> None:
        """The move is made: it is part of the episode from now on."""
        assert self._said is not None, "speak() comes before moved()"
        self.state = LoopState.INTERACTING
        completion, self._said = self._said, None
        prompt_tokens = len(self._tokens.ids)
        self._tokens.sampled(completion, self._version)
        self._turns.append(
            Turn(prompt_tokens, len(completion.token_ids), completion.text, completion.stop_reason, None)
        )
        self._answered = (tuple(self._messages), completion)
        self._messages.append(Message("assistant", completion.text))

    def rewarded(self, reward: Reward) -> None:
        """A reward for it, which may come of the move of another agent: it belongs to its last turn."""
        added = self._rewards.add(reward)
        if added is not None and self._turns:
            self._turns[-1] = replace(self._turns[-1], reward=(self._turns[-1].reward or 0.0) + added)

    @property
    def may_move(self) -> bool:
        """Whether the limit of turns leaves it another move."""
        return self._limits.turns is None or len(self._turns) < self._limits.turns

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

    def finish(self, session: EnvironmentSession, ended: Ended) -> Trajectory:
        """What it played. The reward is the episode's for it, where that was asked for; otherwise the sum."""
        self.state = LoopState.TERMINATED
        reward = ended.rewards.get(self.agent, self._rewards.total)
        if not ended.reason.trainable:
            reward = Reward.unscored()
        segments = [*self._closed_segments, self._tokens.freeze()]
        return Trajectory(
            group=self._group,
            member=self._member,
            episode=session.episode,
            segments=tuple(segment for segment in segments if any(segment.loss_mask)),
            turns=tuple(self._turns),
            reward=reward,
            end_reason=ended.reason,
            temperature=self._temperature,
            messages=tuple(self._messages),
            metrics=ended.metrics,
            env_seconds=session.env_seconds,
            replays=session.replays,
            error=ended.error,
            agent=self.agent,
            policy=self.policy,
            opponents=ended.opponents,
            illegal_actions=self._illegal,
            malformed_calls=self._malformed,
        )
