"""Environments: what an agent acts in. Defining one needs neither grpc nor numpy nor torch.

    class GuessNumber(Environment):
        def reset(self, *, seed, task): return Observation("Guess a number from 1 to 9.")
        def step(self, action): return StepResult(reward=float(action.text == "5"), terminated=True)

Playing one (`sources`, `session`, `hosted`) is imported on first use only.
"""

from typing import TYPE_CHECKING, Any

from opentinker.environments.agents import JointResult, JointStep
from opentinker.environments.base import Environment, EnvironmentClass, EnvironmentInfo, Task, describe
from opentinker.environments.content import Array, Content, Image, Json, Message, Part, Text, ToolCall
from opentinker.environments.errors import (
    EnvironmentDefinitionError,
    InvalidEpisodeData,
    InvalidOptions,
    InvalidReward,
)
from opentinker.environments.loops import Endpoint, LoopEnvironment
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward, RewardKind, RewardStatus, RewardSum
from opentinker.environments.single_turn import single_turn
from opentinker.environments.tools import Tool, ToolEnvironment, ToolError, tool
from opentinker.environments.types import (
    AGENT,
    Action,
    EndReason,
    EpisodeResult,
    Observation,
    StepResult,
    legal_actions,
)

if TYPE_CHECKING:
    from opentinker.environments.hosted import HostedEnvironment, HostedSession
    from opentinker.environments.session import EnvironmentSession, LocalSession, end_reason_of
    from opentinker.environments.sources import (
        EnvironmentSource,
        EnvironmentSpec,
        LocalEnvironment,
        environment_source,
    )

_LAZY = {
    "EnvironmentSession": "session",
    "LocalSession": "session",
    "end_reason_of": "session",
    "HostedEnvironment": "hosted",
    "HostedSession": "hosted",
    "EnvironmentSource": "sources",
    "EnvironmentSpec": "sources",
    "LocalEnvironment": "sources",
    "environment_source": "sources",
}

__all__ = [
    "AGENT",
    "Action",
    "Array",
    "Content",
    "EndReason",
    "Endpoint",
    "Environment",
    "EnvironmentClass",
    "EnvironmentDefinitionError",
    "EnvironmentInfo",
    "EnvironmentSession",
    "EnvironmentSource",
    "EnvironmentSpec",
    "EpisodeResult",
    "HostedEnvironment",
    "HostedSession",
    "Image",
    "InvalidEpisodeData",
    "InvalidOptions",
    "InvalidReward",
    "JointResult",
    "JointStep",
    "Json",
    "LocalEnvironment",
    "LocalSession",
    "LoopEnvironment",
    "Message",
    "Metric",
    "Observation",
    "Part",
    "Reward",
    "RewardKind",
    "RewardStatus",
    "RewardSum",
    "StepResult",
    "Task",
    "Text",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "ToolError",
    "describe",
    "end_reason_of",
    "environment_source",
    "legal_actions",
    "single_turn",
    "tool",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
