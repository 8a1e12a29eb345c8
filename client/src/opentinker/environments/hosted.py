"""Episodes that run on env_host, behind the same port as those that run here.

A session keeps what it needs to play its episode again: seed, task and actions. If the host lost the episode,
or its last steps (it was restarted, or the lease ran out), the session opens it anew, replays, and goes on
only if every answer is the same.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc.aio

from opentinker.environments.agents import Actions, JointResult, JointStep, Observations
from opentinker.environments.base import EnvironmentInfo, Task
from opentinker.environments.content import dump_json
from opentinker.environments.drive import EpisodeCalls
from opentinker.environments.session import END_REASON, EnvironmentSession, OneAgent, typed_error
from opentinker.environments.types import EndReason, Observation
from opentinker.environments.wire import (
    actions_to_proto,
    info_from_proto,
    observations_from_proto,
    result_from_proto,
    step_from_proto,
)
from opentinkerapi.env.v1 import env_host_service_pb2 as pb
from opentinkerapi.env.v1.env_host_service_pb2_grpc import EnvHostServiceStub
from opentinkerapi.runtime.calls import typed_errors
from opentinkerapi.runtime.errors import (
    Cancelled,
    EpisodeNotFound,
    FailedPrecondition,
    InvalidArgument,
    OpenTinkerError,
    Overloaded,
    Unavailable,
)
from opentinkerapi.runtime.reasons import Reason

LEASE_TTL_S = 60.0
RECONNECT_S = 60.0
"""How long an unreachable host is waited for before its episodes are given up."""
OVERLOADED_S = 1800.0
"""How long a host that has no room yet is asked again: others' episodes have to end first."""
_MAX_REOPENS = 3

T = TypeVar("T")
_Answer = TypeVar("_Answer")


class HostedSession(OneAgent):
    """One episode on env_host."""

    def __init__(
        self, owner: "HostedEnvironment", episode: str, *, seed: int, task: Mapping[str, Any]
    ) -> None:
        self._owner = owner
        self._episode = episode
        self._seed = seed
        self._task = task
        self._first: Observations | None = None
        self._journal: list[tuple[Actions, JointStep]] = []
        self._env_seconds = 0.0
        self._replays = 0

    @property
    def episode(self) -> str:
        return self._episode

    @property
    def env_seconds(self) -> float:
        return self._env_seconds

    @property
    def replays(self) -> int:
        return self._replays

    async def begin_all(self) -> Observations:
        observations = await self._held(self._begin)
        if self._first is None:
            self._first = observations
        return observations

    async def step_all(self, actions: Actions, seq: int) -> JointStep:
        result = await self._held(lambda: self._step(actions, seq))
        if seq == len(self._journal) + 1:
            self._journal.append((actions, result))
        return result

    async def finalize_all(self) -> JointResult:
        async def call() -> JointResult:
            request = pb.FinalizeRequest(episode=self._episode, last_seq=len(self._journal))
            return result_from_proto(await self._owner.call(self._owner.calls.finalize, request))

        return await self._held(call)

    async def close(self) -> None:
        await self._owner.release([self._episode])

    async def _begin(self) -> Observations:
        request = pb.BeginRequest(episode=self._episode)
        answer = await self._owner.call(self._owner.calls.begin, request)
        observations = observations_from_proto(answer.pending)
        if not observations:
            raise typed_error(Reason.ENV_CRASHED, "the environment gave no first observation")
        return observations

    async def _step(self, actions: Actions, seq: int) -> JointStep:
        request = pb.StepRequest(episode=self._episode, seq=seq, actions=actions_to_proto(actions))
        answer = await self._owner.call(self._owner.calls.step, request)
        self._env_seconds += answer.env_time.ToTimedelta().total_seconds()
        self._replays += answer.replayed
        return step_from_proto(answer)

    async def _held(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; where the host no longer has the episode, play it again first."""
        for _ in range(_MAX_REOPENS):
            try:
                return await call()
            except EpisodeNotFound as gone:
                if not self._owner.holds(self._episode):
                    raise  # closed by ourselves
                await self._reopen(gone)
            except FailedPrecondition as behind:
                if not self._is_ahead(behind):
                    raise
                await self._reopen(behind)
        return await call()

    def _is_ahead(self, behind: FailedPrecondition) -> bool:
        """Whether we have answers that the host no longer knows of: it lost the end of its journal."""
        if behind.reason == Reason.STEP_OUT_OF_ORDER:
            return int(behind.metadata.get("next_seq", 1 << 62)) <= len(self._journal)
        return behind.reason == Reason.INVALID_STATE and self._first is not None and not self._journal

    async def _reopen(self, gone: OpenTinkerError) -> None:
        if self._first is not None and not self._owner.info.deterministic:
            raise _lost("it does not promise to repeat itself") from gone
        old = self._episode
        self._episode = (await self._owner.open_episodes(self._task, self._seed, 1))[1][0]
        self._owner.forget([old])
        self._replays += 1
        if self._first is None:
            return
        if _shown(await self._begin()) != _shown(self._first):
            raise _lost("its first observation came out differently") from gone
        for seq, (actions, known) in enumerate(self._journal, start=1):
            if _outcome(await self._step(actions, seq)) != _outcome(known):
                raise _lost(f"step {seq} came out differently") from gone


class HostedEnvironment:
    """A source of episodes on env_host. Its leases are renewed in the background until `close`."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        info: EnvironmentInfo,
        options: Mapping[str, Any],
        *,
        step_timeout_s: float,
        job_token: str | Callable[[], str] = "",
        lease_ttl_s: float = LEASE_TTL_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.stub = EnvHostServiceStub(channel)
        self.info = info
        self._job_token = job_token
        self.calls = EpisodeCalls(self.stub, lambda: self.job_token)
        self.options = dict(options)
        self._name = f"environments/{info.name}"
        self._options_json = dump_json(self.options) if options else ""
        self._step_timeout_s = step_timeout_s
        self._lease_ttl_s = lease_ttl_s
        self._reconnect_s = reconnect_s
        self._episodes: set[str] = set()
        self._renewals: asyncio.Task[None] | None = None

    @property
    def job_token(self) -> str:
        """The token of the job that plays, as it is now."""
        return self._job_token() if callable(self._job_token) else self._job_token

    async def tasks(self, split: str) -> Sequence[Task] | None:
        """The tasks of a split, None where they are drawn from the seed."""
        if split not in self.info.splits:
            return None
        tasks: list[Task] = []
        request = pb.ListTasksRequest(
            environment=self._name, split=split, page_size=1000, options_json=self._options_json
        )
        while True:
            try:
                answer = await self.call(self.stub.ListTasks, request)
            except InvalidArgument as error:
                if error.metadata.get("tasks") == "drawn":
                    return None
                raise
            tasks += [json.loads(task) for task in answer.tasks_json]
            if not answer.next_page_token:
                return tasks
            request.page_token = answer.next_page_token

    async def open_group(
        self, *, task: Mapping[str, Any], seed: int, size: int, request_id: str = ""
    ) -> tuple[EnvironmentSession, ...]:
        """Open the episodes of one group. `request_id` only where the call may be repeated by another
        process.
        """
        _, episodes = await self.open_episodes(task, seed, size, request_id)
        return tuple(HostedSession(self, episode, seed=seed, task=task) for episode in episodes)

    async def open_episodes(
        self, task: Mapping[str, Any], seed: int, size: int, request_id: str = ""
    ) -> tuple[str, Sequence[str]]:
        """The group's and the episodes' names."""
        request = pb.OpenGroupRequest(
            request_id=request_id or uuid.uuid4().hex,
            environment=self._name,
            size=size,
            seed=seed,
            task_json=dump_json(dict(task)) if task else "",
            options_json=self._options_json,
            job_token=self.job_token,
        )
        request.lease_ttl.FromNanoseconds(int(self._lease_ttl_s * 1e9))
        request.step_timeout.FromNanoseconds(int(self._step_timeout_s * 1e9))
        answer = await self.call(self.stub.OpenGroup, request)
        self._episodes.update(answer.episodes)
        if self._renewals is None:
            self._renewals = asyncio.create_task(self._renew(), name=f"leases of {self._name}")
        return answer.group, list(answer.episodes)

    async def release(self, episodes: Sequence[str]) -> None:
        """Close episodes. If the host cannot be told, their leases run out by themselves."""
        held = [episode for episode in episodes if episode in self._episodes]
        self.forget(held)
        if held:
            request = pb.CloseEpisodesRequest(episodes=held, job_token=self.job_token)
            try:
                with typed_errors():
                    await self.stub.CloseEpisodes(request, timeout=10.0)
            except OpenTinkerError:
                return

    def holds(self, episode: str) -> bool:
        """Whether the episode is open as far as this process knows."""
        return episode in self._episodes

    def forget(self, episodes: Sequence[str]) -> None:
        """Stop renewing these."""
        self._episodes.difference_update(episodes)

    async def close(self) -> None:
        """Close what is open and stop renewing."""
        await self.release(list(self._episodes))
        self.calls.close()
        if self._renewals is not None:
            self._renewals.cancel()
            self._renewals = None

    async def call(self, method: Callable[..., Awaitable[_Answer]], request: Any) -> _Answer:
        """One call; an unreachable host is asked again for a while, one that is full for longer. Raises the
        client's typed errors.

        Every method used here may be repeated: by its request_id, its seq, or because it reads.
        """
        give_up = time.monotonic() + self._reconnect_s
        full_until = time.monotonic() + OVERLOADED_S
        # The host ends a step at its deadline; the slack is for a replay before it and for queueing.
        timeout = 60.0 + 4 * self._step_timeout_s
        pause = 0.1
        while True:
            try:
                with typed_errors():
                    return await method(request, timeout=timeout)
            except (Unavailable, Overloaded, Cancelled) as error:
                # Cancelled by the other side: a host that is stopped answers what it was doing so.
                now = time.monotonic()
                if isinstance(error, Overloaded):
                    give_up = now + self._reconnect_s  # it answers
                if now + pause > (full_until if isinstance(error, Overloaded) else give_up):
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ttl_s / 3)
            names = sorted(self._episodes)
            for start in range(0, len(names), 1000):
                request = pb.RenewLeaseRequest(episodes=names[start : start + 1000], job_token=self.job_token)
                try:
                    with typed_errors():
                        await self.stub.RenewLease(request, timeout=10.0)
                except OpenTinkerError:
                    # Tried again in a third of the TTL; an episode lost meanwhile is played again.
                    break


async def list_hosted(channel: grpc.aio.Channel) -> dict[str, EnvironmentInfo]:
    """Every environment that the host can play, by name."""
    stub = EnvHostServiceStub(channel)
    found: dict[str, EnvironmentInfo] = {}
    request = pb.ListEnvironmentsRequest(page_size=1000)
    while True:
        with typed_errors():
            answer = await stub.ListEnvironments(request, timeout=30.0)
        for environment in answer.environments:
            info = info_from_proto(environment)
            found[info.name] = info
        if not answer.next_page_token:
            return found
        request.page_token = answer.next_page_token


def _lost(why: str) -> OpenTinkerError:
    return typed_error(
        Reason.ENV_CRASHED,
        f"env_host lost the episode and it could not be played again: {why}",
        metadata={END_REASON: EndReason.SANDBOX_LOST},
    )


def _shown(observations: Observations) -> object:
    # Not the info: it may hold timings.
    return {name: _seen(observation) for name, observation in observations.items()}


def _seen(observation: Observation) -> object:
    return observation.content, observation.messages, observation.legal_actions


def _outcome(result: JointStep) -> object:
    return _shown(result.observations), result.rewards, result.ended, result.terminated, result.truncated
