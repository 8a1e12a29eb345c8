"""The class that users write, and what is read off it without playing it."""

import inspect
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from opentinker.environments.agents import JointStep
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.measures import Metric
from opentinker.environments.rewards import Reward
from opentinker.environments.types import AGENT, Observation, StepResult

Task = Mapping[str, Any]

DEFAULT_SPLITS = ("train", "test")
Rewards = Mapping[str, Reward | float | None]
"""By agent."""

_AGENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Environment:
    """One game, problem or tool box; an instance plays one episode and is then thrown away.

    Write `reset` and `step`, plain or `async`. What `__init__` takes are the environment's options.
    Everything random is drawn from `seed`, so that the same seed, task and actions give the same episode:
    that is how an episode survives the death of its process. An environment that cannot promise this sets
    `deterministic = False`.
    """

    version: ClassVar[str] = "1"
    """Version of its code."""
    max_turns: ClassVar[int] = 0
    """Turns after which it ends by itself; 0 where it does not."""
    deterministic: ClassVar[bool] = True
    """The same seed, task and actions give the same episode."""
    splits: ClassVar[tuple[str, ...]] = ()
    """Splits for which `tasks` gives a list. By default "train" and "test" where `tasks` is written at
    all.
    """
    agents: ClassVar[tuple[str, ...]] = (AGENT,)
    """Who plays. An environment that names them gets and gives dicts by agent: `reset` the observations of
    those whose move is pending, `step` their actions, for a `JointStep`; `finalize` their returns.
    """
    tools: ClassVar[tuple[Any, ...]] = ()
    """What the model may call (`ot.tool`). Its chat template shows them; calls come as
    `action.tool_calls`.
    """
    tell_legal_actions: ClassVar[bool] = True
    """Add an observation's `legal_actions` to it in words. False where it says them itself."""
    run_timeout_s: ClassVar[float] = 0.0
    """Set by `LoopEnvironment` only."""
    copyable: ClassVar[bool] = True
    """A deep copy of an instance holds the whole episode, so that a copy can be played on from there. False
    where something of it lives elsewhere: in globals of a library, in a server. Not asked where the class has
    `snapshot` and `restore` of its own.
    """
    awaits: ClassVar[bool] = False
    """A plain method returns an awaitable; set by factories only (`async def` is seen without it)."""

    def reset(
        self, *, seed: int, task: dict[str, Any]
    ) -> Observation | Mapping[str, Observation] | Awaitable[Observation | Mapping[str, Observation]]:
        """Start the episode; returns the first observation. Called once. `task` is empty where `tasks` gives
        none.
        """
        raise NotImplementedError

    def step(self, action: Any, /) -> StepResult | JointStep | Awaitable[StepResult | JointStep]:
        """Apply what the model said, an Action; of named agents, a dict of those whose moves were pending.
        What a model got wrong is an observation for it, not an exception.
        """
        raise NotImplementedError

    def tasks(self, split: str) -> Sequence[Task] | None:
        """The tasks of a split, each a JSON object; None where tasks are drawn from the seed in `reset`.

        Called on an instance with the options of the run; may be a classmethod.
        """
        return None

    def finalize(
        self,
    ) -> Reward | float | Rewards | Awaitable[Reward | float | Rewards | None] | None:
        """The return of the whole episode, where only its end tells; None: the sum of the rewards, as for an
        agent that a dict leaves out.
        """
        return None

    def metrics(self) -> Mapping[str, float | Metric]:
        """Numbers about the episode for the logs, asked for at its end. `env/NAME/mean` is their mean over
        episodes; a Metric has a weight in it, or is summed, or of which the largest or smallest counts.
        """
        return {}

    def close(self) -> Awaitable[None] | None:
        """Free what the episode held. Called once, whatever ended the episode."""
        return None


EnvironmentClass = type[Environment]


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """What an environment says about itself. `name` is the hosted name, or the class's."""

    name: str
    description: str = ""
    version: str = "1"
    max_turns: int = 0
    deterministic: bool = True
    splits: tuple[str, ...] = ()
    agents: tuple[str, ...] = (AGENT,)
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, in OpenAI's shape."""
    run_timeout_s: float = 0.0
    """Above 0 where it owns the model loop (`LoopEnvironment`): what a run takes at most."""
    snapshots: str = "NONE"
    """How its episodes can be forked, the best way first tried: NATIVE, COPY, REPLAY, NONE."""


def describe(cls: EnvironmentClass, name: str = "") -> EnvironmentInfo:
    """Read the class attributes and check them. EnvironmentDefinitionError says what cannot be played."""
    check_class(cls)
    return EnvironmentInfo(
        name=name or cls.__name__,
        description=inspect.cleandoc(cls.__doc__ or ""),
        version=str(cls.version),
        max_turns=int(cls.max_turns),
        deterministic=bool(cls.deterministic),
        splits=tuple(cls.splits) or (DEFAULT_SPLITS if cls.tasks is not Environment.tasks else ()),
        agents=tuple(cls.agents),
        tools=tuple(each.schema for each in cls.tools),
        run_timeout_s=float(cls.run_timeout_s),
        snapshots=snapshots_of(cls),
    )


def has_snapshots(cls: EnvironmentClass) -> bool:
    """Whether it has methods of its own: `snapshot()`, whose result is JSON, and `restore(state)`, called on
    a fresh instance in place of `reset`.
    """
    return callable(getattr(cls, "snapshot", None)) and callable(getattr(cls, "restore", None))


def snapshots_of(cls: EnvironmentClass) -> str:
    """The best way to take a snapshot of its episodes."""
    if has_snapshots(cls):
        return "NATIVE"
    if cls.copyable:
        return "COPY"
    return "REPLAY" if cls.deterministic else "NONE"


def check_class(cls: object) -> None:
    """EnvironmentDefinitionError unless `cls` is an environment that this version can play."""
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise EnvironmentDefinitionError(
            f"{cls!r} is no environment: give a subclass of opentinker.Environment, not an instance"
        )
    missing = [name for name in ("reset", "step") if getattr(cls, name) is getattr(Environment, name)]
    missing += [name for name in ("run",) if getattr(getattr(cls, name, None), "__isabstractmethod__", False)]
    if missing:
        raise EnvironmentDefinitionError(f"{cls.__name__} does not define {' and '.join(missing)}")
    names = () if isinstance(cls.agents, str) else tuple(cls.agents)
    if not names or len(set(names)) < len(names) or not all(map(_is_agent_name, names)):
        raise EnvironmentDefinitionError(
            f"{cls.__name__}.agents is {cls.agents!r}: it must be a tuple of different names of letters, "
            "digits and _.-"
        )


def has_names(cls: EnvironmentClass) -> bool:
    """Whether its agents have names, so that dicts pass between it and them."""
    return tuple(cls.agents) != (AGENT,)


def _is_agent_name(name: object) -> bool:
    return isinstance(name, str) and _AGENT_NAME.fullmatch(name) is not None


def check_options(cls: EnvironmentClass, options: Mapping[str, Any]) -> None:
    """InvalidOptions if `__init__` does not take these options or lacks one."""
    signature = inspect.signature(cls)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(signature.parameters) or "none"
        raise InvalidOptions(f"options of {cls.__name__}: {error}; allowed: {allowed}") from None


def make(cls: EnvironmentClass, options: Mapping[str, Any]) -> Environment:
    """A fresh instance for one episode (or to ask for tasks)."""
    check_options(cls, options)
    return cls(**options)


def is_async(cls: EnvironmentClass) -> bool:
    """Whether its steps are coroutines, which may wait without holding a thread."""
    methods = (cls.reset, cls.step, cls.finalize, cls.close)
    return cls.awaits or any(inspect.iscoroutinefunction(method) for method in methods)
