"""Environments that own the model loop: any agent that speaks OpenAI's API.

    class Terse(LoopEnvironment):
        async def run(self, *, endpoint, seed, task):
            reply = await endpoint.client().chat.completions.create(model=endpoint.model, messages=[...])
            return float(reply.choices[0].message.content == task["answer"])

Seen from outside a run is an episode of one step, whose action is the endpoint and whose reward is what `run`
returned. What is said at the endpoint is recorded there, not here: an agent has nothing to train with and
nothing to score itself with.
"""

import inspect
import json
import math
from abc import abstractmethod
from collections.abc import Awaitable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from opentinker.environments.base import Environment
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.rewards import Reward
from opentinker.environments.types import AGENT, Action, Observation, StepResult

MAX_RUN_S = 3600.0
TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a call that a limit refused: the context, or a limit of the episode."""

Scored = Reward | float | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds its model: an OpenAI base URL, the key that opens it, the model's name there."""

    base_url: str
    api_key: str = field(repr=False)
    model: str = "policy"

    def client(self, **options: Any) -> Any:
        """An `openai.AsyncOpenAI` for it."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def blocking_client(self, **options: Any) -> Any:
        """An `openai.OpenAI` for it."""
        from openai import OpenAI

        return OpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    def as_action(self) -> Action:
        """As it is given to an environment."""
        return Action(json.dumps(asdict(self)))

    @classmethod
    def of(cls, action: Action) -> "Endpoint":
        """From what an environment was given. InvalidEpisodeData for anything else."""
        try:
            given = json.loads(action.text)
            return cls(str(given["base_url"]), str(given["api_key"]), str(given["model"]))
        except (ValueError, TypeError, KeyError) as error:
            text = "an environment that owns the model loop is given the JSON of an endpoint"
            raise InvalidEpisodeData(text) from error


class LoopEnvironment(Environment):
    """Write `run`, plain or `async`: play one episode with the model at `endpoint`, return its reward.

    What it raises is a fault of the environment (ENV_CRASH) and no reward. Only a call that was refused
    because the conversation is too long, or because a limit of the episode is reached, is the model's own
    end: what `stopped` returns is the reward then.
    """

    deterministic: ClassVar[bool] = False
    run_timeout_s: ClassVar[float] = 600.0
    """What a run takes at most, up to an hour; then STEP_TIMEOUT."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not (math.isfinite(cls.run_timeout_s) and 0 < cls.run_timeout_s <= MAX_RUN_S):
            text = f"it must be above 0 and at most {MAX_RUN_S:g}"
            raise EnvironmentDefinitionError(f"{cls.__name__}.run_timeout_s is {cls.run_timeout_s}: {text}")
        if tuple(cls.agents) != (AGENT,) or cls.tools:
            raise EnvironmentDefinitionError(
                f"{cls.__name__} owns the model loop: it names neither agents nor tools, its run sees to both"
            )
        if cls.deterministic:
            text = "a run is never played again, since its model would be asked again"
            raise EnvironmentDefinitionError(f"{cls.__name__}.deterministic: {text}")
        cls.awaits = inspect.iscoroutinefunction(cls.run)

    @abstractmethod
    def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> Scored | Awaitable[Scored]:
        """Play the episode; its reward, or None where it has none."""
        raise NotImplementedError

    def stopped(self, error: Exception) -> Scored:
        """The reward where a limit stopped the model in the middle of `run`. By default none."""
        return None

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self._seed, self._task = seed, task
        return Observation("", info={"loop": True})

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        endpoint = Endpoint.of(action)
        try:
            value = self.run(endpoint=endpoint, seed=self._seed, task=self._task)
        except Exception as error:
            return self._stopped(error)
        return self._run_on(value) if isinstance(value, Awaitable) else _scored(value)

    async def _run_on(self, value: Awaitable[Scored]) -> StepResult:
        try:
            return _scored(await value)
        except Exception as error:
            return self._stopped(error)

    def _stopped(self, error: Exception) -> StepResult:
        if not any(getattr(each, "code", None) == TOO_LONG for each in _chain(error)):
            raise error
        return StepResult(reward=self.stopped(error), truncated=True, info={"stopped": str(error)})


def _scored(value: Scored) -> StepResult:
    return StepResult(reward=value, terminated=True)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what led to it: agents wrap what their client raised."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        at = waiting.pop()
        if at is None or at in seen:
            continue
        seen.append(at)
        yield at
        waiting += [at.__cause__, at.__context__]
        if isinstance(at, BaseExceptionGroup):
            waiting += at.exceptions
