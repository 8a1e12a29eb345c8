"""Plays one episode of one instance and checks everything that the environment's code returns.

In-process sessions and the worker of env_host both play through this class, so an environment behaves the
same in both. It knows nothing of threads, deadlines or the wire: how a method is called is an argument.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from copy import deepcopy
from typing import Any, TypeVar

from opentinker.environments.agents import (
    Actions,
    JointResult,
    JointStep,
    Observations,
    observations_of,
    tell_legal_actions,
)
from opentinker.environments.base import Environment, EnvironmentClass, has_names, make
from opentinker.environments.content import plain_json
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.measures import read_metrics
from opentinker.environments.observed import check_observation
from opentinker.environments.rewards import Reward, RewardKind, RewardSum
from opentinker.environments.types import AGENT, EndReason, Observation, StepResult

Invoke = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a method of the environment and awaits what it returns if that is awaitable."""

T = TypeVar("T")


class _Left(Exception):
    """Its code raised what would end more than its call: `sys.exit()`, a stray StopIteration."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


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
        self._named = has_names(cls)
        self._rewards = {name: RewardSum() for name in cls.agents}
        self._gone: set[str] = set()
        self._end: EndReason | None = None
        self._result: JointResult | None = None

    @property
    def ended(self) -> bool:
        """The environment ended the episode."""
        return self._end is not None

    async def begin(self, seed: int, task: Mapping[str, Any]) -> Observations:
        """Make the instance and reset it; whose move it is and what they see."""

        def start() -> Any:
            self._environment = make(self._cls, self._options)
            return self._environment.reset(seed=seed, task=plain_json(task, "task"))

        given = await self._call("reset", start)
        if not self._named:
            if not isinstance(given, Observation):
                raise self._wrong("reset", "an Observation", given)
            given = {AGENT: given}
        if not isinstance(given, Mapping) or not given:
            raise self._wrong("reset", "a dict of observations by agent", given)
        try:
            observations = observations_of(given)
            self._check_names(observations)
            return self._told(observations)
        except Exception as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.reset", error) from None

    async def step(self, actions: Actions) -> JointStep:
        """Apply the actions of those whose moves are pending."""
        environment = self._begun()
        given = dict(actions) if self._named else actions[AGENT]
        result = await self._call("step", lambda: environment.step(given))
        kind = JointStep if self._named else StepResult
        if not isinstance(result, kind):
            raise self._wrong("step", f"a {kind.__name__}", result)
        step = JointStep.of(result) if isinstance(result, StepResult) else result
        try:
            self._check_names(step.observations, step.rewards, step.ended)
            for name, reward in step.rewards.items():
                self._rewards[name].add(reward)
            self._gone |= set(step.ended)
            late = sorted(self._gone & set(step.observations))
            if late and not step.done:
                raise InvalidEpisodeData(f"a move of {late} is pending, for whom the episode is over")
            shown = step.showing(self._told(step.observations))
        except Exception as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.step", error) from None
        if step.terminated:
            self._end = EndReason.TERMINATED
        elif step.truncated:
            self._end = EndReason.TRUNCATED
        return shown

    async def finalize(self) -> JointResult:
        """The returns of the episode and its numbers; the same again when asked again."""
        if self._result is not None:
            return self._result
        environment = self._begun()
        given = await self._call("finalize", environment.finalize)
        numbers = await self._call("metrics", environment.metrics)
        if self._named and not (given is None or isinstance(given, Mapping)):
            raise self._wrong("finalize", "a dict of rewards by agent, or None", given)
        returns = (given or {}) if self._named else {AGENT: given}
        try:
            self._check_names(returns)
            rewards = {
                name: sum_.total if returns.get(name) is None else _terminal(Reward.of(returns[name]))
                for name, sum_ in self._rewards.items()
            }
            metrics = read_metrics(numbers)
        except Exception as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.finalize", error) from None
        self._result = JointResult(rewards, self._end, metrics)
        return self._result

    async def state(self) -> dict[str, Any]:
        """The episode as JSON, by the environment's own `snapshot`."""
        environment: Any = self._begun()
        state = await self._call("snapshot", environment.snapshot)
        try:
            kept = plain_json({"state": state}, "snapshot")["state"]
        except ValueError as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.snapshot", error) from None
        return {
            "environment": kept,
            "rewards": {name: sum_.state for name, sum_ in self._rewards.items()},
            "gone": sorted(self._gone),
            "end": str(self._end) if self._end is not None else "",
        }

    async def go_on_from(self, state: Mapping[str, Any]) -> None:
        """Be an episode as `state` gave it, by `restore` of a fresh instance. Called in place of `begin`."""

        def start() -> Any:
            environment: Any = make(self._cls, self._options)
            self._environment = environment
            return environment.restore(state["environment"])

        await self._call("restore", start)
        self._rewards = {name: RewardSum.of_state(each) for name, each in state["rewards"].items()}
        self._gone = set(state["gone"])
        self._end = EndReason(state["end"]) if state["end"] else None

    def copy(self) -> "Runner":
        """Another one at the same place, with a deep copy of the instance. Raises what copying raises."""
        made = Runner(self._cls, self._options, self._invoke)
        made._environment = deepcopy(self._begun())
        made._rewards = deepcopy(self._rewards)
        made._gone, made._end, made._result = set(self._gone), self._end, self._result
        return made

    async def close(self) -> None:
        """Free the instance."""
        environment, self._environment = self._environment, None
        if environment is not None:
            await self._call("close", environment.close)

    def drop(self) -> None:
        """Free the instance of a plain class, from the thread that was the last in it. Never raises."""
        environment, self._environment = self._environment, None
        if environment is not None:
            # Nobody is there any longer to be told what it raises.
            with contextlib.suppress(BaseException):
                environment.close()

    def _begun(self) -> Environment:
        if self._environment is None:
            raise EnvironmentRaised(self._cls.__name__, InvalidEpisodeData("the episode has not begun"))
        return self._environment

    def _told(self, observations: Observations) -> Observations:
        for each in observations.values():
            check_observation(each)
        if not self._cls.tell_legal_actions:
            return observations
        return {name: tell_legal_actions(each) for name, each in observations.items()}

    def _check_names(self, *by_agent: Mapping[str, Any]) -> None:
        if unknown := sorted({name for each in by_agent for name in each} - set(self._rewards)):
            raise InvalidEpisodeData(f"there is no agent {unknown[0]!r}; agents: {', '.join(self._rewards)}")

    async def _call(self, name: str, method: Callable[[], Any]) -> Any:
        try:
            return await self._invoke(lambda: _contained(method))
        except _Left as left:
            raise EnvironmentRaised(f"{self._cls.__name__}.{name}", left.cause) from left.cause
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled us: it is the environment's own.
            raise EnvironmentRaised(f"{self._cls.__name__}.{name}", error) from error
        except (Exception, SystemExit) as error:
            raise EnvironmentRaised(f"{self._cls.__name__}.{name}", error) from error

    def _wrong(self, name: str, wanted: str, value: object) -> EnvironmentRaised:
        text = f"must return {wanted}, not {type(value).__name__}"
        return EnvironmentRaised(f"{self._cls.__name__}.{name}", InvalidEpisodeData(text))


def _contained(method: Callable[[], Any]) -> Any:
    try:
        return method()
    except StopIteration as error:
        # It would end the coroutine that waits for it, or never get through to it from a thread.
        raise _Left(error) from error
    except Exception:
        raise
    except BaseException as error:
        raise _Left(error) from error


def _terminal(reward: Reward) -> Reward:
    return Reward(reward.value, reward.status, RewardKind.TERMINAL, reward.components)
