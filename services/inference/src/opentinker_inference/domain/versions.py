"""Names of weights: policies, versions, checkpoints, and the keys that engines know them by."""

import re
from dataclasses import dataclass
from pathlib import Path

from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

_POLICY = re.compile(r"policies/[a-z0-9]([a-z0-9_-]{0,62}[a-z0-9])?")
_CHECKPOINT = re.compile(rf"({_POLICY.pattern})/checkpoints/([a-z0-9][a-z0-9-]{{0,62}})")
NO_VERSION = -1
"""What spans of a checkpoint's completions name."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A policy at a version or a checkpoint, or (without a policy) the base model."""

    policy: str = ""
    version: int = 0
    base_model: str = ""
    checkpoint: str = ""
    """Its id, where the weights are a checkpoint's; the version is then `NO_VERSION`."""

    @property
    def is_base(self) -> bool:
        return not self.policy

    @property
    def key(self) -> str:
        """The name engines know the weights by; "" is the base model."""
        if self.checkpoint:
            return f"{self.policy}/checkpoints/{self.checkpoint}"
        return f"{self.policy}/versions/{self.version}" if self.policy else ""

    def __str__(self) -> str:
        return self.key or "the base model"


BASE = ModelRef()


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Version of a policy that sampled the tokens [start, end) of a completion."""

    start: int
    end: int
    version: int


def policy_of(key: str) -> str:
    """The policy of an engine's key; "" for the base model."""
    return "/".join(key.split("/")[:2])


def version_of(key: str) -> int:
    """The number of an engine's key; 0 for the base model, which has no versions."""
    number = key.rpartition("/versions/")[2]
    return int(number) if number.isdecimal() else NO_VERSION if key else 0


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """Validated weights of a version on this host: an adapter in PEFT layout, or (`full`) every weight of the
    model in Hugging Face layout.
    """

    directory: Path
    full: bool = False


def checkpoint_ref(name: str, field: str) -> ModelRef:
    """A policy at a checkpoint; INVALID_FIELD for what is no such name."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        text = f"{name!r} is not the name of a checkpoint (policies/{{policy}}/checkpoints/{{checkpoint}})"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)
    return ModelRef(policy=match[1], version=NO_VERSION, checkpoint=match[3])


def check_policy_name(name: str, field: str) -> None:
    """INVALID_FIELD unless `name` can be a part of an object's key and of a path."""
    if not _POLICY.fullmatch(name):
        text = f"{name!r} is not the name of a policy (policies/{{policy}})"
        raise ServiceError(Reason.INVALID_FIELD, text, field=field)
