"""An agent whose environment owns the model loop: it gets an endpoint, and what it says there is recorded.

Its one move is the endpoint of an episode at the gateway, opened anew for each episode that is played. When
the environment's run is over, `collect` fetches the tokens, and what the gateway knows of calls that failed:
an agent may have gone on without an answer, which must not become a reward.
"""

import asyncio
from dataclasses import replace

from opentinker import errors
from opentinker.environments.base import EnvironmentInfo
from opentinker.environments.loops import Endpoint
from opentinker.environments.rewards import Reward, RewardSum
from opentinker.environments.session import EnvironmentSession
from opentinker.environments.types import AGENT, Action, EndReason, Observation
from opentinker.rollout.agent_loop import AgentStopped
from opentinker.rollout.cast import Voice
from opentinker.rollout.formats import CHAT_TEMPLATE
from opentinker.rollout.limits import Limits
from opentinker.rollout.trajectory import Ended, Trajectory
from opentinker.sampling.params import SamplingParams
from opentinker.serving.recorded import RecordedEpisode, create_episode, decided

CLOSE_TIMEOUT_S = 15.0
_LIMITS = {"calls": EndReason.TURN_LIMIT, "tokens": EndReason.TOKEN_LIMIT}
_GATEWAY_LOST = (errors.Unavailable, errors.InternalError, errors.DeadlineExceeded, errors.Overloaded)


class RecordedAgent:
    """The agent of one episode of an environment that owns the model loop."""

    def __init__(
        self,
        voice: Voice,
        params: SamplingParams,
        limits: Limits,
        *,
        group: str,
        member: int,
        seed: int,
        agent: str = AGENT,
    ) -> None:
        self.agent = agent
        self.policy = voice.policy
        self.trained = voice.trained
        self._voice = voice
        # The gateway lists by itself which ids were left, where some are cut.
        self._decided = decided(replace(params, return_support=False))
        self._limits = {
            name: value
            for name, value in (("max_calls", limits.turns), ("max_tokens", limits.tokens_per_episode))
            if value is not None
        }
        self._group = group
        self._member = member
        self._seed = seed
        self._episode: RecordedEpisode | None = None
        self._played: Trajectory | None = None
        self._rewards = RewardSum()

    def hear(self, observation: Observation) -> None:
        """What there is to see its environment shows it."""

    overhear = hear

    async def speak(self) -> Action:
        """The endpoint of a new episode. AgentStopped if the gateway cannot be reached."""
        voice = self._voice
        try:
            self._episode = await create_episode(
                voice.owner,
                self._group,
                self._member,
                version=voice.version,
                decided=self._decided,
                seed=self._seed,
                limits=self._limits,
            )
        except _GATEWAY_LOST as error:
            raise AgentStopped(EndReason.CANCELLED, f"no episode was recorded: {error}") from error
        return Endpoint(self._episode.base_url, self._episode.api_key).as_action()

    def moved(self) -> None:
        """Its move is the whole episode."""

    def rewarded(self, reward: Reward) -> None:
        """What its environment gives for the run."""
        self._rewards.add(reward)

    @property
    def may_move(self) -> bool:
        """The gateway sees to the limit of turns."""
        return True

    async def collect(self) -> AgentStopped | None:
        """Fetch what was said. What the gateway says ended it: a limit, or that a call was never answered."""
        if self._episode is None:
            return None
        try:
            facts = await self._episode.facts()
            self._played = await self._episode.played()
        except (errors.EpisodeNotFound, *_GATEWAY_LOST) as error:
            return AgentStopped(EndReason.SANDBOX_LOST, f"what was recorded is lost: {error}")
        if facts["lost"]:
            text = f"a call of the agent was never answered: {facts['lost']}"
            return AgentStopped(EndReason.CANCELLED, text)
        return AgentStopped(_LIMITS[facts["limit"]]) if facts["limit"] else None

    def finish(self, session: EnvironmentSession, ended: Ended) -> Trajectory:
        """What it played."""
        reward = ended.rewards.get(self.agent, self._rewards.total)
        played = self._played
        turns = played.turns if played is not None else ()
        if not turns or not ended.reason.trainable:
            # A run in which the model was not asked says nothing about it.
            reward = Reward.unscored()
        if turns and reward.value is not None:
            turns = (*turns[:-1], replace(turns[-1], reward=reward.value))
        return Trajectory(
            group=self._group,
            member=self._member,
            episode=session.episode,
            segments=played.segments if played is not None else (),
            turns=turns,
            reward=reward,
            end_reason=ended.reason,
            temperature=played.temperature if played is not None else 1.0,
            messages=played.messages if played is not None else (),
            metrics=ended.metrics,
            env_seconds=session.env_seconds,
            replays=session.replays,
            error=ended.error,
            agent=self.agent,
            policy=self.policy,
            opponents=ended.opponents,
        )

    async def close(self) -> None:
        """End the episode at the gateway, and with it what the agent is still asking for."""
        if self._episode is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._episode.end()
        except (errors.OpenTinkerError, TimeoutError):
            # It is forgotten by itself when nobody asks for anything.
            return


def check_loop(environment: EnvironmentInfo, limits: Limits, renderer: str) -> None:
    """InvalidArgument for what nobody could see to where the environment owns the model loop."""
    if not environment.run_timeout_s:
        return
    default = Limits()
    for name in ("tool_calls", "parse_errors", "illegal_actions"):
        if getattr(limits, name) != getattr(default, name):
            text = f"{environment.name} owns the model loop and sees to this itself"
            raise errors.invalid(f"limits.{name}", text)
    if renderer not in ("", CHAT_TEMPLATE):
        text = f"{environment.name} owns the model loop: the gateway speaks the model's own chat template"
        raise errors.invalid("renderer", text)
