"""What was played: turns, segments, trajectories, groups, batches. All frozen; a bad episode is data, not a
crash.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opentinker.environments.content import Message
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward
from opentinker.environments.types import AGENT, EndReason
from opentinker.sampling.completion import StopReason
from opentinker.sampling.prompt import PlacedImage
from opentinker.sampling.support import Support


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of n tokens in which each prompt extends the one before.

    `loss_mask` [n] is 1 where the policy sampled the token; `logprobs` [n] float32 are the sampler's there, 0
    elsewhere; `spans` are (start, end, version) of the sampled runs; `images` are in order, `token_ids` has
    the model's placeholder at their places.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: NDArray[np.float32]
    spans: tuple[tuple[int, int, int], ...]
    images: tuple[PlacedImage, ...] = ()
    support: Support | None = None
    """What each token was chosen among, where the sampler returned that; of other tokens the vocabulary."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled action. `reward` is what the environment gave for it, None where it gave nothing."""

    prompt_tokens: int
    completion_tokens: int
    text: str
    stop_reason: StopReason
    reward: float | None


@dataclass(frozen=True, slots=True)
class Opponent:
    """Another agent of an episode: the policy, with its version where that is frozen, or script that
    played it, and what it got.
    """

    policy: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """How an episode ended for an agent. `rewards` by agent, where the environment was asked for them."""

    reason: EndReason
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    metrics: Mapping[str, float | Metric] = field(default_factory=dict)
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's part of one episode. More than one segment where the chat template rewrote history."""

    group: str
    member: int
    episode: str
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    reward: Reward
    end_reason: EndReason
    temperature: float
    messages: tuple[Message, ...] = ()
    """The conversation, for people."""
    metrics: Mapping[str, float | Metric] = field(default_factory=dict)
    """Numbers that the environment reports."""
    env_seconds: float = 0.0
    replays: int = 0
    error: str = ""
    """What failed, where something did."""
    agent: str = AGENT
    policy: str = ""
    """The run's name of the policy that played it."""
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    """The other agents of the episode."""
    illegal_actions: int = 0
    """Turns whose action was none of those that the environment listed."""
    malformed_calls: int = 0
    """Tool calls that could not be read, each an observation for the model."""

    def without_tokens(self) -> "Trajectory":
        """What says how it went: reward, end, numbers; not what was said."""
        turns = tuple(replace(turn, text="") for turn in self.turns)
        return replace(self, segments=(), messages=(), turns=turns)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def counts(self) -> bool:
        """Whether its reward may be used: it has one, and not the infrastructure ended it."""
        return self.end_reason.trainable and self.reward.is_valid


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes of one task with one environment seed. `ordinal` is its place in the run's order of tasks."""

    id: str
    ordinal: int
    task: Mapping[str, Any]
    seed: int
    trajectories: tuple[Trajectory, ...]

    def without_tokens(self) -> "Group":
        """With trajectories without their tokens."""
        return replace(self, trajectories=tuple(each.without_tokens() for each in self.trajectories))

    @property
    def rewards(self) -> list[float]:
        """The rewards that count."""
        return [
            trajectory.reward.value
            for trajectory in self.trajectories
            if trajectory.counts and trajectory.reward.value is not None
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, in the order of their ordinals. `version` sampled them."""

    index: int
    version: int
    groups: tuple[Group, ...]
    seconds: float = 0.0
    engine_seconds: float = 0.0
    """Wall time in which the inference engine worked on it, as the service reports it."""

    @classmethod
    def of(cls, trajectories: Iterable[Trajectory], index: int = 0) -> "Batch":
        """A batch of trajectories that were played elsewhere, by the groups that they name."""
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        versions = [
            version
            for members in groups.values()
            for trajectory in members
            for segment in trajectory.segments
            for _, _, version in segment.spans
        ]
        made = [Group(name, i, {}, 0, tuple(members)) for i, (name, members) in enumerate(groups.items())]
        return cls(index, max(versions, default=0), tuple(made))

    def of_policy(self, name: str) -> "Batch":
        """What one policy of several played."""
        groups = []
        for group in self.groups:
            own = tuple(each for each in group.trajectories if each.policy == name)
            if own:
                groups.append(replace(group, trajectories=own))
        return replace(self, groups=tuple(groups))

    def __iter__(self) -> Iterator[Trajectory]:
        return (trajectory for group in self.groups for trajectory in group.trajectories)

    @property
    def rewards(self) -> list[float]:
        """The rewards that count, over all groups."""
        return [reward for group in self.groups for reward in group.rewards]
