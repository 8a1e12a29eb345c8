"""Rewards: an optional value with its status, and the one place that adds them up.

Invariant: a reward that was not given is UNSCORED and has no value; what failed has a status that says so and
no value either. Neither is ever 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from opentinker.environments.errors import InvalidReward


class RewardStatus(StrEnum):
    """Whether a reward may be trusted."""

    VALID = "VALID"
    """The value counts."""
    UNSCORED = "UNSCORED"
    """No reward was given; not the same as 0."""
    ENV_ERROR = "ENV_ERROR"
    """The environment failed."""
    GRADER_ERROR = "GRADER_ERROR"
    """The reward function failed."""
    TIMEOUT = "TIMEOUT"
    """Grading took too long."""


class RewardKind(StrEnum):
    """What a value adds up to."""

    DELTA = "DELTA"
    """Added to what came before."""
    CUMULATIVE = "CUMULATIVE"
    """The total so far."""
    TERMINAL = "TERMINAL"
    """The whole episode's, given once."""


_FAILURES = (RewardStatus.ENV_ERROR, RewardStatus.GRADER_ERROR, RewardStatus.TIMEOUT)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward. `value` is finite where `status` is VALID, otherwise None; `components` are named parts."""

    value: float | None = None
    status: RewardStatus = RewardStatus.VALID
    kind: RewardKind = RewardKind.DELTA
    components: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status is not RewardStatus.VALID:
            if self.value is not None:
                raise InvalidReward(f"a reward with status {self.status} has no value, not {self.value}")
        else:
            object.__setattr__(self, "value", _finite(self.value, "reward"))
        parts = {
            str(name): _finite(part, f"reward component {name!r}") for name, part in self.components.items()
        }
        object.__setattr__(self, "components", parts)

    @classmethod
    def of(cls, value: "Reward | float | None") -> "Reward":
        """A reward from what a `step` may give: a number, nothing (UNSCORED), or a Reward."""
        if isinstance(value, Reward):
            return value
        return cls.unscored() if value is None else cls(value)

    @classmethod
    def unscored(cls) -> "Reward":
        """No reward was given."""
        return cls(status=RewardStatus.UNSCORED)

    @classmethod
    def failed(cls, status: RewardStatus) -> "Reward":
        """The environment or the grader failed, so that there is no reward."""
        if status not in _FAILURES:
            raise InvalidReward(f"{status} is no failure; use one of {', '.join(_FAILURES)}")
        return cls(status=status)

    @property
    def is_valid(self) -> bool:
        return self.status is RewardStatus.VALID


class RewardSum:
    """Adds up the rewards of one agent's episode, whatever their kinds.

    A DELTA is added, a CUMULATIVE replaces the sum, a TERMINAL is the sum of the whole episode and comes
    once. A failure makes the whole return that failure; an episode with no valid reward at all is UNSCORED.
    """

    def __init__(self) -> None:
        self._value = 0.0
        self._components: dict[str, float] = {}
        self._status = RewardStatus.UNSCORED
        self._terminal = False

    def add(self, reward: Reward) -> float | None:
        """Take the reward of a turn; returns what it adds to the sum, or None if it has no value."""
        if reward.status in _FAILURES:
            if self._status not in _FAILURES:
                self._status = reward.status
            return None
        if reward.value is None:
            return None
        if self._terminal:
            raise InvalidReward("a reward after the TERMINAL one, which is the whole episode's")
        self._terminal = reward.kind is RewardKind.TERMINAL
        before = self._value
        added = reward.kind is RewardKind.DELTA
        self._value = _finite(before + reward.value if added else reward.value, "sum of rewards")
        for name, part in reward.components.items():
            self._components[name] = self._components.get(name, 0.0) + part if added else part
        if self._status is RewardStatus.UNSCORED:
            self._status = RewardStatus.VALID
        return self._value - before

    @property
    def state(self) -> dict[str, Any]:
        """What it has added up, as JSON."""
        return {
            "value": self._value,
            "components": dict(self._components),
            "status": str(self._status),
            "terminal": self._terminal,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "RewardSum":
        """One that goes on from there."""
        made = cls()
        made._value, made._terminal = float(state["value"]), bool(state["terminal"])
        made._components = {str(name): float(part) for name, part in state["components"].items()}
        made._status = RewardStatus(state["status"])
        return made

    @property
    def total(self) -> Reward:
        """The episode's return so far, of kind TERMINAL."""
        if self._status is not RewardStatus.VALID:
            return Reward(status=self._status, kind=RewardKind.TERMINAL)
        return Reward(self._value, kind=RewardKind.TERMINAL, components=dict(self._components))


def total(rewards: Iterable[Reward]) -> Reward:
    """The return of an episode that gave these rewards."""
    result = RewardSum()
    for reward in rewards:
        result.add(reward)
    return result.total


def _finite(value: object, what: str) -> float:
    # numpy scalars and booleans are numbers here; text that looks like one is not.
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise InvalidReward(f"{what} must be a finite number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise InvalidReward(f"{what} is {number}; rewards must be finite (return None where there is none)")
    return number
