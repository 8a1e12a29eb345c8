"""What passes between an agent and an environment in one episode."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from opentinker.environments.content import Content, Message, Part, ToolCall, plain_json
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward

AGENT = "agent"
"""The name of the only agent of an episode."""


class EndReason(StrEnum):
    """What ended an episode."""

    TERMINATED = "TERMINATED"
    """The environment reached an end state."""
    TRUNCATED = "TRUNCATED"
    """The environment cut the episode."""
    TURN_LIMIT = "TURN_LIMIT"
    """The limit of turns."""
    TOKEN_LIMIT = "TOKEN_LIMIT"
    """The limit of tokens, of a turn or of the episode."""
    TOOL_LIMIT = "TOOL_LIMIT"
    """The limit of tool calls."""
    STEP_TIMEOUT = "STEP_TIMEOUT"
    """A step of the environment took too long."""
    EPISODE_TIMEOUT = "EPISODE_TIMEOUT"
    """The whole episode took too long."""
    PARSE_ERROR_LIMIT = "PARSE_ERROR_LIMIT"
    """Too many malformed actions."""
    CANCELLED = "CANCELLED"
    """The caller gave up."""
    ENV_CRASH = "ENV_CRASH"
    """The environment raised, or ended its process."""
    SANDBOX_LOST = "SANDBOX_LOST"
    """The process that held the episode died and the episode could not be replayed."""
    LEASE_EXPIRED = "LEASE_EXPIRED"
    """Nobody renewed the episode's lease."""

    @property
    def trainable(self) -> bool:
        """Whether an episode that ended so is trained on by default.

        What the model did counts; what the infrastructure did never becomes a reward and leaves the group.
        """
        return self in _TRAINABLE


_TRAINABLE = frozenset(
    {
        EndReason.TERMINATED,
        EndReason.TRUNCATED,
        EndReason.TURN_LIMIT,
        EndReason.TOKEN_LIMIT,
        EndReason.TOOL_LIMIT,
        EndReason.PARSE_ERROR_LIMIT,
    }
)


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees: `content` of a user message, or whole `messages` to append to the conversation.

    `info` is for people and logs and never shown to the model; `legal_actions` where the environment lists
    them.
    """

    content: Content | None
    messages: tuple[Message, ...]
    info: Mapping[str, Any]
    legal_actions: tuple[str, ...]

    def __init__(
        self,
        content: Content | str | Part | Iterable[str | Part] | None = None,
        *,
        messages: Iterable[Message | Mapping[str, Any]] = (),
        info: Mapping[str, Any] | None = None,
        legal_actions: Iterable[str] = (),
    ) -> None:
        given = tuple(Message.of(message) for message in messages)
        if (content is None) == (not given):
            raise InvalidEpisodeData("an observation has either content or messages")
        set_field = object.__setattr__
        set_field(self, "content", None if content is None else Content.of(content))
        set_field(self, "messages", given)
        set_field(self, "info", plain_json(info or {}, "info"))
        set_field(self, "legal_actions", tuple(str(action) for action in legal_actions))

    @property
    def text(self) -> str:
        """The text of the content, or of all messages, one a line."""
        if self.content is not None:
            return self.content.text
        return "\n".join(message.content.text for message in self.messages)

    def as_messages(self) -> tuple[Message, ...]:
        """The messages to append to the conversation: the given ones, or one user message of the content."""
        return self.messages if self.content is None else (Message("user", self.content),)


def legal_actions(mask: Iterable[Any], names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The names of the actions that a mask allows: their places where they have none."""
    bits = [bool(bit) for bit in mask]
    called = [str(place) for place in range(len(bits))] if names is None else list(names)
    if len(called) != len(bits):
        raise InvalidEpisodeData(f"a mask of {len(bits)} actions of which {len(called)} have names")
    return tuple(name for name, bit in zip(called, bits, strict=True) if bit)


@dataclass(frozen=True, slots=True)
class Action:
    """What an agent does: what the model said, and the tools it called."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidEpisodeData(f"an action's text must be str, not {type(self.text).__name__}")
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a turn. `observation` may be left out at the end; a reward left out is UNSCORED, not 0."""

    observation: Observation | None
    reward: Reward
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    def __init__(
        self,
        observation: Observation | str | None = None,
        reward: Reward | float | None = None,
        terminated: bool = False,
        truncated: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(observation, str):
            observation = Observation(observation)
        if observation is not None and not isinstance(observation, Observation):
            raise InvalidEpisodeData(f"observation must be an Observation, not {type(observation).__name__}")
        set_field = object.__setattr__
        set_field(self, "observation", observation)
        set_field(self, "reward", Reward.of(reward))
        set_field(self, "terminated", bool(terminated))
        set_field(self, "truncated", bool(truncated))
        set_field(self, "info", plain_json(info or {}, "info"))
        if observation is None and not self.done:
            raise InvalidEpisodeData("a step that does not end the episode must give the next observation")

    @property
    def done(self) -> bool:
        """The environment ended the episode."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an episode came to: its return, and why it ended (None: the environment did not end it)."""

    reward: Reward
    end_reason: EndReason | None = None
    metrics: Mapping[str, float | Metric] = field(default_factory=dict)
