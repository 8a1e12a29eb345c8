"""Plays one episode of one instance and checks everything that the environment's code returns.

In-process sessions and the worker of env_host both play through this class, so an environment behaves the
same in both. It knows nothing of threads, deadlines or the wire: how a method is called is an argument.
"""

import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from opentinker.environments.base import Environment, EnvironmentClass, make
from opentinker.environments.content import plain_json
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.rewards import Reward, RewardKind, RewardSum
from opentinker.environments.types import Action, EndReason, EpisodeResult, Observation, StepResult

Invoke = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a method of the environment and awaits what it returns if that is awaitable."""

T = TypeVar("T")


class EnvironmentRaised(Exception):
    """The environment's own code raised, or returned what it may not; `text` says what, `trace` where."""

    def __init__(self, where: str, cause: BaseException) -> None:
        self.text = f"{where} raised {type(cause).__name__}: {cause}"
        self.trace = "".join(traceback.format_exception(cause))
        super().__init__(self.text)


async def call_directly(method: Callable[[], Any]) -> Any:
    """Invoke in the calling thread."""
    value = method()
    return await value if isinstance(value, Awaitable) else value


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of plain methods do not. No event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise EnvironmentDefinitionError(
        "a plain method returned an awaitable; declare reset and step `async def`"
    )


class Runner:
    """One episode. Every method may raise EnvironmentRaised, after which the episode is over."""

    def __init__(
        self, cls: EnvironmentClass, options: Mapping[str, Any], invoke: Invoke = call_directly
    ) -> None:
        self._cls = cls
        self._options = options
        self._invoke = invoke
        self._environment: Environment | None = None
        self._rewards = RewardSum()
        self._end: EndReason | None = None
        self._result: EpisodeResult | None = None

    @property
    def ended(self) -> bool:
        """The environment ended the episode."""
        return self._end is not None

    async def begin(self, seed: int, task: Mapping[str, Any]) -> Observation:
        """Make the instance and reset it."""

        def start() -> Any:
            self._environment = make(self._cls, self._options)
            return self._environment.reset(seed=seed, task=plain_json(task, "task"))

        observation = await self._call("reset", start)
        if not isinstance(observation, Observation):
            raise self._wrong("reset", "an Observation", observation)
        return observation

    async def step(self, action: Action) -> StepResult:
        """Apply one action."""
        environment = self._begun()
        result = await self._call("step", lambda: environment.step(action))
        if not isinstance(result, StepResult):
            raise self._wrong("step", "a StepResult", result)
        try:
            self._rewards.add(result.reward)
        except ValueError as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.step", error) from None
        if result.terminated:
            self._end = EndReason.TERMINATED
        elif result.truncated:
            self._end = EndReason.TRUNCATED
        return result

    async def finalize(self) -> EpisodeResult:
        """The return of the episode and its numbers; the same again when asked again."""
        if self._result is not None:
            return self._result
        environment = self._begun()
        given = await self._call("finalize", environment.finalize)
        numbers = await self._call("metrics", environment.metrics)
        try:
            reward = self._rewards.total if given is None else _terminal(Reward.of(given))
            metrics = {name: float(value) for name, value in plain_json(numbers, "metrics").items()}
        except (TypeError, ValueError) as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.finalize", error) from None
        self._result = EpisodeResult(reward, self._end, metrics)
        return self._result

    async def close(self) -> None:
        """Free the instance."""
        environment, self._environment = self._environment, None
        if environment is not None:
            await self._call("close", environment.close)

    def _begun(self) -> Environment:
        if self._environment is None:
            raise EnvironmentRaised(self._cls.__name__, InvalidEpisodeData("the episode has not begun"))
        return self._environment

    async def _call(self, name: str, method: Callable[[], Any]) -> Any:
        try:
            return await self._invoke(method)
        except Exception as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.{name}", error) from error

    def _wrong(self, name: str, wanted: str, value: object) -> EnvironmentRaised:
        text = f"must return {wanted}, not {type(value).__name__}"
        return EnvironmentRaised(f"{self._cls.__name__}.{name}", InvalidEpisodeData(text))


def _terminal(reward: Reward) -> Reward:
    return Reward(reward.value, reward.status, RewardKind.TERMINAL, reward.components)
