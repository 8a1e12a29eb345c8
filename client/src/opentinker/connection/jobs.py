"""A job as its client holds it: created, kept alive, found again after a server was lost, ended.

A `Link` is the way to one slot of the job at one moment. Calls go through `Job.through`, which waits while
the job has no server, sends the same request again where that is safe, and gives up when the job has ended.
Inference slots may be replicas: a request that one of them did not answer goes to another at once, while the
job looks for the successor of the one that failed.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import grpc.aio

from opentinker import errors
from opentinker.connection.calls import PAUSE_S, ControlPlane, answer, stream
from opentinker.connection.replicas import Replicas
from opentinkerapi.inference.v1 import inference_service_pb2
from opentinkerapi.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from opentinkerapi.runtime.status import decode
from opentinkerapi.runtime.together import together
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

T = TypeVar("T")
Watcher = Callable[[str], None]

RENEW_EVERY_S = 30.0
"""The lease lasts 10 minutes: a scheduler may be away for long before a job is lost."""

PATIENCE_S = 600.0
"""How long calls to a slot may fail in a row before they are given up, though the job has not ended."""

SEEK_S, SEEK_AT_MOST_S = 1.0, 10.0
"""How long after each other a job is asked for the successor of a replica, first and at most."""

PROBE_S = 2.0
"""How long a replica that failed has to answer, before it is used again."""

FINAL = (job_pb2.JOB_STATE_SUCCEEDED, job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_CANCELLED)


class Role(Enum):
    """What a slot does."""

    TRAINER = job_pb2.SLOT_ROLE_TRAINER
    INFERENCE = job_pb2.SLOT_ROLE_INFERENCE


@dataclass(frozen=True, slots=True)
class Link:
    """The way to one slot. `epoch` counts how often the job's endpoints were asked for when it was handed
    out.
    """

    role: Role
    address: str
    attempt: int
    token: Callable[[], str]
    channel: grpc.aio.Channel
    epoch: int

    @property
    def job_token(self) -> str:
        """The job's newest token: each lasts only as long as the lease that it came with."""
        return self.token()


class Job:
    """One job of this client. Everything here runs on the client's loop."""

    def __init__(
        self,
        control: ControlPlane,
        name: str,
        *,
        roles: Collection[Role] = tuple(Role),
        watcher: Watcher | None = None,
    ) -> None:
        self._control = control
        self.name = name
        self.roles = frozenset(roles)
        """What its slots do."""
        self._watcher = watcher
        self._said = ""
        self._replicas: dict[Role, Replicas[Link]] = {}
        self._seeking: dict[Role, asyncio.Task[None]] = {}
        self._epoch = 0
        self._resolving = asyncio.Lock()
        self._trouble_since: float | None = None
        self._end_error: errors.OpenTinkerError | None = None
        self.on_end: list[Callable[[errors.OpenTinkerError], None]] = []
        """Called once when the job turns out to have ended."""
        self._renewals = asyncio.create_task(self._renew_for_ever())
        self._token = ""
        self._channels: dict[str, grpc.aio.Channel] = {}
        """By address."""

    @classmethod
    async def create(
        cls, control: ControlPlane, spec: job_pb2.Job, *, watcher: Watcher | None = None
    ) -> "Job":
        """Queue a job. What the cluster can never satisfy is refused here."""
        request = scheduler_service_pb2.CreateJobRequest(request_id=f"job-{uuid.uuid4().hex}", job=spec)
        response = await control.call(lambda channel: SchedulerServiceStub(channel).CreateJob(request))
        roles = {Role(slot.role) for slot in spec.slots}
        return cls(control, response.job.name, roles=roles, watcher=watcher)

    async def link(self, role: Role) -> Link:
        """The way to a slot, waiting until the job runs. JobEnded (or the cause) if it has ended."""
        return (await self._of(role)).pick()

    async def links(self, role: Role) -> list[Link]:
        """The ways to all replicas of a slot that answer."""
        return (await self._of(role)).links

    @contextlib.asynccontextmanager
    async def routed(self, role: Role, conversation: str = "", weight: int = 1) -> AsyncIterator[Link]:
        """The replica for a request of `weight` completions, which counts as its load while the block runs.

        All requests of a conversation get the same one, as long as it answers.
        """
        replicas = await self._of(role)
        link = replicas.pick(conversation)
        with replicas.using(link, weight):
            yield link

    async def any_link(self) -> Link:
        """The way to whichever slot the job has."""
        async with self._resolving:
            if not self._replicas:
                await self._resolve()
        return next(iter(self._replicas.values())).pick()

    async def recover(self, failed: Link, error: errors.OpenTinkerError) -> None:
        """After a call on `failed` did not get through: look where the slot is now.

        At once where another replica is left. Calls that failed together look once. Raises `error` when this
        has gone on for too long, TlsFailed where it would go on for ever.
        """
        if self._replicas[failed.role].lost(failed):
            self._seek(failed.role)
            return
        async with self._resolving:
            if self._epoch > failed.epoch:
                return
            now = time.monotonic()
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since > PATIENCE_S:
                raise error
            why = await self._control.explained(error, failed.address)
            if why is not error:
                raise why
            await asyncio.sleep(PAUSE_S)
            await self._resolve()

    async def through(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> T:
        """Make a call that is safe to repeat on a slot of the job, again and again while its server is
        away.
        """
        while True:
            async with self.routed(role) as link:
                try:
                    result = await call(link)
                except (errors.Unavailable, errors.StaleAttempt, errors.Cancelled) as error:
                    # Cancelled by the other side: a server that is stopped answers what it was doing so.
                    failure = error
                except errors.Overloaded as error:
                    await asyncio.sleep(error.retry_after_s or PAUSE_S)
                    continue
                else:
                    self.answered(link)
                    return result
            await self.recover(link, failure)

    async def everywhere(self, role: Role, call: Callable[[Link], Awaitable[T]]) -> list[T]:
        """Make such a call on every replica; the answers of those that are there, at least one."""
        links = await self.links(role)
        if len(links) == 1:
            return [await self.through(role, call)]
        answers = await together(self._once(link, call) for link in links)
        given = [each[0] for each in answers if each]
        return given or [await self.through(role, call)]

    def answered(self, link: Link | None = None) -> None:
        """Note that a slot answered: what failed before is over."""
        self._trouble_since = None
        if link is not None:
            self._replicas[link.role].answered(link)

    async def finish(self, *, failed: bool = False, message: str = "") -> None:
        """End the job with an outcome. Ending it twice is no error."""
        outcome = job_pb2.JOB_STATE_FAILED if failed else job_pb2.JOB_STATE_SUCCEEDED
        request = scheduler_service_pb2.FinishJobRequest(
            name=self.name, request_id=f"finish-{self.name}", outcome=outcome, message=message[:500]
        )
        await self._end(lambda channel: SchedulerServiceStub(channel).FinishJob(request))

    async def cancel(self) -> None:
        """End the job without an outcome."""
        request = scheduler_service_pb2.CancelJobRequest(name=self.name, request_id=f"cancel-{self.name}")
        await self._end(lambda channel: SchedulerServiceStub(channel).CancelJob(request))

    async def close(self) -> None:
        """Stop renewing and close the channels; the job itself goes on until its lease ends."""
        for task in (self._renewals, *self._seeking.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for channel in self._channels.values():
            await channel.close()

    async def _of(self, role: Role) -> Replicas[Link]:
        """The replicas of a slot, at least one, waiting until the job runs."""
        if self._end_error is not None:
            raise self._end_error
        if role not in self._replicas:
            async with self._resolving:
                if role not in self._replicas:
                    await self._resolve()
        if role not in self._replicas:
            raise errors.FailedPrecondition(
                f"{self.name} has no {role.name.lower()} slot", reason=errors.Reason.INVALID_STATE
            )
        return self._replicas[role]

    async def _once(self, link: Link, call: Callable[[Link], Awaitable[T]]) -> tuple[T] | None:
        """One call on one replica; None where it is not there, which `_seek` sees to."""
        while True:
            try:
                result = await call(link)
            except (errors.Unavailable, errors.StaleAttempt, errors.Cancelled):
                self._replicas[link.role].lost(link)
                self._seek(link.role)
                return None
            except errors.Overloaded as error:
                await asyncio.sleep(error.retry_after_s or PAUSE_S)
            else:
                self.answered(link)
                return (result,)

    def _seek(self, role: Role) -> None:
        """Look for a lost replica or its successor, in the background, once at a time."""
        if role not in self._seeking:
            task = self._seeking[role] = asyncio.create_task(self._seek_until_whole(role))
            task.add_done_callback(lambda _: self._seeking.pop(role, None))

    async def _seek_until_whole(self, role: Role) -> None:
        pause, whole = SEEK_S, False
        while not whole and self._end_error is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, SEEK_AT_MOST_S)
            with contextlib.suppress(errors.OpenTinkerError):
                lease = await self._renew()
                # While the job has no endpoints, its calls fail and wait by themselves.
                if lease.job.state == job_pb2.JOB_STATE_RUNNING and lease.endpoints:
                    self._adopt(lease)
                replicas = self._replicas[role]
                await together(self._probe(link) for link in replicas.suspects)
                wanted = sum(slot.count for slot in lease.job.slots if Role(slot.role) is role)
                whole = len(replicas) >= wanted and not replicas.suspects

    async def _probe(self, link: Link) -> None:
        """Use a replica again that answers again."""
        request = inference_service_pb2.GetCapabilitiesRequest()
        with contextlib.suppress(errors.OpenTinkerError):
            await answer(InferenceServiceStub(link.channel).GetCapabilities(request, timeout=PROBE_S))
            self._replicas[link.role].answered(link)

    async def _end(self, call: Callable[[grpc.aio.Channel], Awaitable[object]]) -> None:
        try:
            # Whoever leaves does not wait two minutes for a scheduler that is gone: the lease ends the job
            # too.
            await self._control.call(call, patience_s=10)
        except errors.OpenTinkerError as error:
            if error.reason not in (errors.Reason.INVALID_STATE, errors.Reason.JOB_NOT_FOUND):
                raise
        finally:
            await self.close()

    async def _renew_for_ever(self) -> None:
        while self._end_error is None:
            await asyncio.sleep(RENEW_EVERY_S)
            # Whatever else is wrong is met by the next call on a link; renewing goes on.
            with contextlib.suppress(errors.OpenTinkerError):
                await self._renew()

    async def _renew(self) -> scheduler_service_pb2.RenewJobLeaseResponse:
        request = scheduler_service_pb2.RenewJobLeaseRequest(name=self.name)
        try:
            lease = await self._control.call(
                lambda channel: SchedulerServiceStub(channel).RenewJobLease(request)
            )
        except errors.OpenTinkerError as error:
            if error.reason in (errors.Reason.INVALID_STATE, errors.Reason.JOB_NOT_FOUND):
                self._ended(await self._post_mortem(error))
            raise self._end_error or error from None
        self._token = lease.job_token
        return lease

    async def _post_mortem(self, refusal: errors.OpenTinkerError) -> errors.OpenTinkerError:
        """Why a lease that cannot be renewed cannot be: how the job ended."""
        request = scheduler_service_pb2.GetJobRequest(name=self.name)
        try:
            answer = await self._control.call(lambda channel: SchedulerServiceStub(channel).GetJob(request))
        except errors.OpenTinkerError:
            return refusal
        return _end_of(answer.job) or refusal

    def _ended(self, error: errors.OpenTinkerError) -> None:
        if self._end_error is None:
            self._end_error = error
            for tell in self.on_end:
                tell(error)

    async def _resolve(self) -> None:
        """Ask for the endpoints until the job runs. Holds `_resolving`."""
        while True:
            lease = await self._renew()
            job = lease.job
            self._tell(job)
            if job.state == job_pb2.JOB_STATE_RUNNING and lease.endpoints:
                self._adopt(lease)
                return
            if job.state in (job_pb2.JOB_STATE_QUEUED, job_pb2.JOB_STATE_PREEMPTED):
                # It waits its turn, which may take hours: that is no trouble with a server.
                self._trouble_since = None
            if job.state == job_pb2.JOB_STATE_PAUSED:
                await self._resume()
            await self._watch_change(job.state)

    async def _watch_change(self, state: "job_pb2.JobState.ValueType") -> None:
        """Wait until the job leaves `state`, at most a few seconds."""
        request = scheduler_service_pb2.WatchJobRequest(name=self.name)
        call = SchedulerServiceStub(self._control.channel()).WatchJob(request, timeout=5)
        try:
            async for response in stream(call):
                self._tell(response.job)
                if response.job.state != state:
                    return
        except (errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled):
            await asyncio.sleep(PAUSE_S)
        finally:
            call.cancel()

    async def _resume(self) -> None:
        request = scheduler_service_pb2.ResumeJobRequest(
            name=self.name, request_id=f"resume-{uuid.uuid4().hex}"
        )
        with contextlib.suppress(errors.FailedPrecondition):
            await self._control.call(lambda channel: SchedulerServiceStub(channel).ResumeJob(request))

    def _adopt(self, lease: scheduler_service_pb2.RenewJobLeaseResponse) -> None:
        self._epoch += 1
        found: dict[Role, list[Link]] = {}
        for endpoint in lease.endpoints:
            role = Role(endpoint.role)
            address = endpoint.address
            if address not in self._channels:
                self._channels[address] = self._control.open(address, self._newest_token)
            channel = self._channels[address]
            link = Link(role, address, endpoint.attempt, self._newest_token, channel, self._epoch)
            found.setdefault(role, []).append(link)
        for role, links in found.items():
            self._replicas.setdefault(role, Replicas()).adopt(links)

    def _newest_token(self) -> str:
        return self._token

    def _tell(self, job: job_pb2.Job) -> None:
        if self._watcher is None:
            return
        state = job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_")
        text = f"{state}: {job.state_reason}" if job.state_reason else state
        if text != self._said:
            self._said = text
            self._watcher(text)


def _end_of(job: job_pb2.Job) -> errors.OpenTinkerError | None:
    """What to raise for a job that has ended: its own error where it has one."""
    if job.state not in FINAL:
        return None
    if job.HasField("error") and job.error.code:
        return errors.from_status_data(decode(job.error))
    state = job_pb2.JobState.Name(job.state).removeprefix("JOB_STATE_").lower()
    said = f": {job.outcome_message}" if job.outcome_message else ""
    return errors.JobEnded(f"{job.name} has ended: {state}{said}", reason=errors.Reason.INVALID_STATE)
