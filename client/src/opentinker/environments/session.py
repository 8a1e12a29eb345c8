"""One episode as whoever drives it sees it: the port, and the implementation that plays in this process.

The agent loop knows only `EnvironmentSession`; whether the environment runs here or on env_host is decided by
the source that opened the session (see `sources`).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from opentinker.environments.agents import Actions, JointResult, JointStep, Observations, movers, only
from opentinker.environments.base import EnvironmentClass
from opentinker.environments.daemon_threads import DaemonThreads
from opentinker.environments.runner import EnvironmentRaised, Runner, call_directly
from opentinker.environments.types import AGENT, Action, EndReason, EpisodeResult, Observation, StepResult
from opentinkerapi.runtime.errors import CLASSES, OpenTinkerError
from opentinkerapi.runtime.reasons import CATALOGUE, Reason

END_REASON = "end_reason"
"""Key in the metadata of ENV_CRASHED errors: the EndReason of the episode."""

_END_REASONS: Mapping[str, EndReason] = {
    Reason.ENV_CRASHED: EndReason.ENV_CRASH,
    Reason.STEP_TIMEOUT: EndReason.STEP_TIMEOUT,
    Reason.EPISODE_NOT_FOUND: EndReason.LEASE_EXPIRED,
    Reason.MESSAGE_TOO_LARGE: EndReason.ENV_CRASH,
    Reason.OVERLOADED: EndReason.SANDBOX_LOST,
}

T = TypeVar("T")

_THREADS = DaemonThreads()


class EnvironmentSession(Protocol):
    """One episode: begin once, step until the result says done, finalize, close.

    `begin_all`, `step_all` and `finalize_all` serve any number of agents; `begin`, `step` and `finalize` are
    the same for an episode whose agents have no names.

    Calls are made one after the other. Failures are typed errors: EnvironmentCrashed, StepTimeout,
    FailedPrecondition (INVALID_STATE, STEP_OUT_OF_ORDER), SeqReused, EpisodeNotFound. After a crash or
    timeout the episode is over and every call but close raises the same error again; `end_reason_of` names
    the end.
    """

    @property
    def episode(self) -> str:
        """Name of the episode, for logs."""
        ...

    @property
    def env_seconds(self) -> float:
        """Time spent inside the environment so far."""
        ...

    @property
    def replays(self) -> int:
        """How often the episode was re-opened from its seed and actions."""
        ...

    async def begin_all(self) -> Observations:
        """Whose move it is and what they see; the same again when asked again."""
        ...

    async def step_all(self, actions: Actions, seq: int) -> JointStep:
        """Apply the actions of turn `seq` (1, 2, 3 …), one of each agent whose move is pending. The last seq
        again returns its answer and does not step.
        """
        ...

    async def finalize_all(self) -> JointResult:
        """The returns of the episode; allowed before the environment ended it. No step may follow."""
        ...

    async def begin(self) -> Observation:
        """The first observation of the only agent."""
        ...

    async def step(self, action: Action, seq: int) -> StepResult:
        """Apply the action of the only agent."""
        ...

    async def finalize(self) -> EpisodeResult:
        """The return of the only agent."""
        ...

    async def close(self) -> None:
        """Free the episode. Never raises for an episode that is gone."""
        ...


def end_reason_of(error: OpenTinkerError) -> EndReason | None:
    """What a session's error says ended the episode; None if it says nothing about the episode (a bug, a bad
    call).
    """
    named = error.metadata.get(END_REASON, "")
    if named in EndReason.__members__:
        return EndReason(named)
    return _END_REASONS.get(error.reason or "")


def typed_error(
    reason: Reason,
    message: str,
    *,
    field: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> OpenTinkerError:
    """The exception of the client's one tree for a reason."""
    return CLASSES[CATALOGUE[reason].code, reason](message, reason=reason, field=field, metadata=metadata)


class _DeadlinePassed(Exception):
    pass


class OneAgent(ABC):
    """`begin`, `step` and `finalize` of the only agent, for who needs no names."""

    @abstractmethod
    async def begin_all(self) -> Observations:
        """See EnvironmentSession."""

    @abstractmethod
    async def step_all(self, actions: Actions, seq: int) -> JointStep:
        """See EnvironmentSession."""

    @abstractmethod
    async def finalize_all(self) -> JointResult:
        """See EnvironmentSession."""

    async def begin(self) -> Observation:
        observation: Observation = only(await self.begin_all(), "moves", None)
        return observation

    async def step(self, action: Action, seq: int) -> StepResult:
        return (await self.step_all({AGENT: action}, seq)).single()

    async def finalize(self) -> EpisodeResult:
        return (await self.finalize_all()).single()


class LocalSession(OneAgent):
    """An episode played in this process. Plain methods run in a thread, so that they never block the loop."""

    def __init__(
        self,
        cls: EnvironmentClass,
        *,
        seed: int,
        task: Mapping[str, Any],
        options: Mapping[str, Any],
        step_timeout_s: float,
        episode: str,
    ) -> None:
        self._name = cls.__name__
        self._episode = episode
        self._seed = seed
        self._task = task
        self._timeout_s = step_timeout_s
        self._runner = Runner(cls, options, self._invoke)
        self._turn = asyncio.Lock()
        self._first: Observations | None = None
        self._pending: Observations = {}
        self._last: tuple[int, Actions, JointStep] | None = None
        self._finalized: JointResult | None = None
        self._failure: OpenTinkerError | None = None
        self._closed = False
        self._inside: Future[Any] | None = None
        """The last call, in its thread."""
        self._env_seconds = 0.0

    @property
    def episode(self) -> str:
        return self._episode

    @property
    def env_seconds(self) -> float:
        return self._env_seconds

    @property
    def replays(self) -> int:
        return 0

    async def begin_all(self) -> Observations:
        async with self._turn:
            self._check_open()
            if self._first is None:
                self._first = self._pending = await self._guard(self._runner.begin(self._seed, self._task))
            return self._first

    async def step_all(self, actions: Actions, seq: int) -> JointStep:
        async with self._turn:
            self._check_open()
            last_seq = self._last[0] if self._last is not None else 0
            if self._last is not None and seq == last_seq:
                if dict(actions) != self._last[1]:
                    raise typed_error(
                        Reason.SEQ_REUSED, f"seq {seq} was used with other actions", field="seq"
                    )
                return self._last[2]
            if seq != last_seq + 1:
                raise typed_error(
                    Reason.STEP_OUT_OF_ORDER,
                    f"seq {seq} is out of order: the next is {last_seq + 1}",
                    field="seq",
                    metadata={"next_seq": str(last_seq + 1)},
                )
            if self._first is None:
                raise typed_error(Reason.INVALID_STATE, "the episode has not begun: call begin first")
            if self._runner.ended or self._finalized is not None:
                raise typed_error(Reason.INVALID_STATE, "the episode has ended: it takes no more steps")
            if wrong := movers(self._pending, actions):
                raise typed_error(Reason.INVALID_FIELD, wrong, field="actions")
            result = await self._guard(self._runner.step(actions))
            self._pending = result.observations
            self._last = (seq, dict(actions), result)
            return result

    async def finalize_all(self) -> JointResult:
        async with self._turn:
            self._check_open()
            if self._first is None:
                raise typed_error(Reason.INVALID_STATE, "the episode has not begun: call begin first")
            if self._finalized is None:
                self._finalized = await self._guard(self._runner.finalize())
            return self._finalized

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._inside is not None and not self._inside.done():
            # The deadline has passed and a thread is still in there: it frees the instance if it returns.
            self._inside.add_done_callback(lambda _: self._runner.drop())
            return
        # What close raises can no longer change the episode.
        failure = self._failure
        try:
            await self._guard(self._runner.close())
        except OpenTinkerError:
            self._failure = failure or self._failure

    async def _invoke(self, method: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                # Under a timeout the thread goes on alone; the episode is over and nobody listens to it.
                self._inside = _THREADS.submit(method)
                value = await asyncio.wrap_future(self._inside)
                return await call_directly(lambda: value)
        except TimeoutError:
            if deadline.expired():
                raise _DeadlinePassed from None
            raise  # the environment's own
        finally:
            self._env_seconds += time.perf_counter() - started

    async def _guard(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except EnvironmentRaised as raised:
            if isinstance(raised.__cause__, _DeadlinePassed):
                self._failure = typed_error(
                    Reason.STEP_TIMEOUT,
                    f"{self._name} did not answer within {self._timeout_s:g} s",
                    metadata={END_REASON: EndReason.STEP_TIMEOUT},
                )
            else:
                self._failure = typed_error(
                    Reason.ENV_CRASHED, raised.text, metadata={END_REASON: EndReason.ENV_CRASH}
                )
            raise self._failure from raised.__cause__
        except asyncio.CancelledError:
            self._failure = typed_error(
                Reason.ENV_CRASHED,
                "the episode was left in the middle of a call",
                metadata={END_REASON: EndReason.CANCELLED},
            )
            raise

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise typed_error(Reason.EPISODE_NOT_FOUND, f"{self._episode} is closed")
