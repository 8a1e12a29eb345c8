"""Episodes of several agents: whose move it is, and what comes of the moves of a turn.

An episode of one agent is the case with one name (`AGENT`): sessions, workers and the wire know this form
only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opentinker.environments.content import Message, plain_json
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward
from opentinker.environments.types import (
    AGENT,
    Action,
    EndReason,
    EpisodeResult,
    Observation,
    StepResult,
)

Observations = Mapping[str, Observation]
"""What each agent sees whose move is pending: one agent where they take turns, several where they move at
once.
"""

Actions = Mapping[str, Action]
"""The moves of a turn: one of each agent whose move was pending."""

_OWN_ENDS = (EndReason.TERMINATED, EndReason.TRUNCATED)


@dataclass(frozen=True, slots=True)
class JointStep:
    """What came of the moves of a turn, of an environment that names its agents.

    `observations` are of those whose move is pending now; at the end, what agents may still see. An agent
    that is left out of `rewards` got none, which is not 0. `ended` names agents for whom it is over while
    others play on: TERMINATED or TRUNCATED.
    """

    observations: Observations
    rewards: Mapping[str, Reward]
    ended: Mapping[str, EndReason]
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    def __init__(
        self,
        observations: Mapping[str, Observation | str] | None = None,
        rewards: Mapping[str, Reward | float | None] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        ended: Mapping[str, EndReason | str] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "observations", observations_of(observations or {}))
        named = _mapping(rewards or {}, "rewards")
        set_field(self, "rewards", {name: Reward.of(reward) for name, reward in named.items()})
        set_field(
            self, "ended", {name: _own_end(end) for name, end in _mapping(ended or {}, "ended").items()}
        )
        set_field(self, "terminated", bool(terminated))
        set_field(self, "truncated", bool(truncated))
        set_field(self, "info", plain_json(info or {}, "info"))
        if not self.observations and not self.done:
            raise InvalidEpisodeData("a step that does not end the episode must say whose move it is")

    @property
    def done(self) -> bool:
        """The environment ended the episode."""
        return self.terminated or self.truncated

    def showing(self, observations: Observations) -> "JointStep":
        """The same with other observations."""
        return JointStep(observations, self.rewards, self.terminated, self.truncated, self.ended, self.info)

    @classmethod
    def of(cls, result: StepResult) -> "JointStep":
        """The step of the only agent."""
        observations = {} if result.observation is None else {AGENT: result.observation}
        return cls(
            observations, {AGENT: result.reward}, result.terminated, result.truncated, info=result.info
        )

    def single(self) -> StepResult:
        """As the only agent sees it. InvalidEpisodeData where there are others."""
        return StepResult(
            only(self.observations, "moves", None),
            only(self.rewards, "rewards", Reward.unscored()),
            self.terminated,
            self.truncated,
            self.info,
        )


@dataclass(frozen=True, slots=True)
class JointResult:
    """What an episode came to, for each agent; `end_reason` and `metrics` are of the whole."""

    rewards: Mapping[str, Reward]
    end_reason: EndReason | None = None
    metrics: Mapping[str, float | Metric] = field(default_factory=dict)

    def single(self) -> EpisodeResult:
        """As the only agent sees it. InvalidEpisodeData where there are others."""
        reward = only(self.rewards, "rewards", Reward.unscored())
        return EpisodeResult(reward, self.end_reason, self.metrics)


def observations_of(given: object) -> dict[str, Observation]:
    """What an environment gave as observations by agent; a text is one. InvalidEpisodeData."""
    observations = {}
    for name, value in _mapping(given, "observations").items():
        observation = Observation(value) if isinstance(value, str) else value
        if not isinstance(observation, Observation):
            text = f"the observation of {name!r} must be an Observation, not {type(value).__name__}"
            raise InvalidEpisodeData(text)
        observations[name] = observation
    return observations


def movers(pending: Observations, actions: Actions) -> str:
    """What is wrong with who moves, or nothing: each agent whose move is pending, and nobody else."""
    if set(pending) == set(actions):
        return ""
    return f"moves of {sorted(pending)} are pending, not of {sorted(actions)}"


def tell_legal_actions(observation: Observation) -> Observation:
    """The observation with its legal actions in words, for models."""
    if not observation.legal_actions:
        return observation
    words = f"Allowed actions: {', '.join(observation.legal_actions)}"
    rest: dict[str, Any] = {"info": observation.info, "legal_actions": observation.legal_actions}
    if observation.content is not None:
        return Observation([*observation.content.parts, f"\n\n{words}"], **rest)
    *before, last = observation.messages
    if last.role == "user":
        spoken = Message("user", [*last.content.parts, f"\n\n{words}"], name=last.name)
        return Observation(messages=[*before, spoken], **rest)
    return Observation(messages=[*observation.messages, Message("user", words)], **rest)


def only(by_agent: Mapping[str, Any], what: str, missing: Any) -> Any:
    """The value of the only agent. InvalidEpisodeData where there are others."""
    if others := sorted(set(by_agent) - {AGENT}):
        raise InvalidEpisodeData(f"{what} of several agents: {', '.join(others)}; the agents have names here")
    return by_agent.get(AGENT, missing)


def _mapping(given: object, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidEpisodeData(f"{what} must be a dict by agent name, not {type(given).__name__}")
    return given


def _own_end(value: EndReason | str) -> EndReason:
    if value not in _OWN_ENDS:
        raise InvalidEpisodeData(f"an agent ends as {' or '.join(_OWN_ENDS)}, not {value!r}")
    return EndReason(value)
