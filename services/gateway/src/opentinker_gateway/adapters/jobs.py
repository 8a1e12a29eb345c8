"""Inference jobs of the gateway's own, for models that are asked for and that nothing serves.

Such a job is made with the key of who asked first, kept alive while it is used, and ended when nobody asked
for a while. If the gateway dies, its lease ends it.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import grpc.aio
import structlog

from opentinker_gateway.adapters.channels import typed_failures
from opentinker_gateway.domain.callers import Caller
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.channels import auth_metadata
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.scheduler.v1 import job_pb2, scheduler_service_pb2
from opentinkerapi.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

log = structlog.get_logger()

LEASE_S = 60
RENEW_S = 15.0
POLL_S = 0.5
_ENDED = (job_pb2.JOB_STATE_SUCCEEDED, job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_CANCELLED)


@dataclass(slots=True)
class _Held:
    """One job."""

    caller: Caller
    name: str
    last_used: float
    lease: scheduler_service_pb2.RenewJobLeaseResponse | None = None
    renewed: float = float("-inf")
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    job_token: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """Who serves a model now."""

    endpoints: tuple[job_pb2.Endpoint, ...]
    token: Callable[[], str]

    @property
    def job_token(self) -> str:
        """The job's newest token: each lasts only as long as the lease that it came with."""
        return self.token()


class OnDemandJobs:
    """One job for each kind of slot and caller."""

    def __init__(self, clock: Clock, *, most: int, idle_s: float, start_s: float) -> None:
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._start_s = start_s
        self._held: dict[tuple[str, bytes], _Held] = {}
        self._making = asyncio.Lock()

    async def serve(self, channel: grpc.aio.Channel, slot: job_pb2.SlotSpec, caller: Caller) -> Served:
        """Endpoints of a job with such a slot; waits until it runs. OVERLOADED where there are too many jobs,
        SERVER_STARTING, with what it waits for, where one takes too long, LAUNCH_FAILED where it fails.
        """
        key = (caller.digest, slot.SerializeToString(deterministic=True))
        stub = SchedulerServiceStub(channel)
        async with self._making:
            held = self._held.get(key)
            if held is None:
                if len(self._held) >= self._most:
                    text = f"{self._most} models are served on demand already; deploy this one, or wait"
                    raise ServiceError(Reason.OVERLOADED, text, retry_after_s=5.0)
                held = await self._create(stub, slot, caller)
                self._held[key] = held
        held.last_used = self._clock.monotonic()
        async with held.starting:
            lease = held.lease
            if lease is None or not lease.endpoints or self._clock.monotonic() - held.renewed > RENEW_S:
                lease = await self._until_running(stub, held, key)
        return Served(tuple(lease.endpoints), lambda: held.job_token)

    def lost(self, slot: job_pb2.SlotSpec, caller: Caller) -> None:
        """An endpoint did not answer: the next call asks the scheduler again."""
        held = self._held.get((caller.digest, slot.SerializeToString(deterministic=True)))
        if held is not None:
            held.lease = None

    async def keep(self, channel: grpc.aio.Channel) -> None:
        """Once: renew what is used, end what is not."""
        stub = SchedulerServiceStub(channel)
        for key, held in list(self._held.items()):
            if self._clock.monotonic() - held.last_used > self._idle_s:
                await self._finish(stub, key, held)
                continue
            with contextlib.suppress(ServiceError):
                await self._renew(stub, held, key)

    async def close(self, channel: grpc.aio.Channel) -> None:
        """End every job."""
        for key, held in list(self._held.items()):
            await self._finish(SchedulerServiceStub(channel), key, held)

    async def _create(self, stub: SchedulerServiceStub, slot: job_pb2.SlotSpec, caller: Caller) -> _Held:
        job = job_pb2.Job(
            display_name=f"gateway: {slot.base_model}",
            kind=job_pb2.JOB_KIND_INFERENCE,
            slots=[slot],
            on_client_loss=job_pb2.ON_CLIENT_LOSS_CANCEL,
        )
        job.lease_ttl.FromTimedelta(timedelta(seconds=LEASE_S))
        request = scheduler_service_pb2.CreateJobRequest(request_id=f"gateway-{uuid.uuid4().hex}", job=job)
        with typed_failures():
            answer = await stub.CreateJob(request, metadata=auth_metadata(caller.key))
        log.info("serving on demand", job=answer.job.name, base_model=slot.base_model)
        return _Held(caller, answer.job.name, self._clock.monotonic())

    async def _until_running(
        self, stub: SchedulerServiceStub, held: _Held, key: tuple[str, bytes]
    ) -> scheduler_service_pb2.RenewJobLeaseResponse:
        deadline = self._clock.monotonic() + self._start_s
        while True:
            lease = await self._renew(stub, held, key)
            if lease.endpoints:
                return lease
            if self._clock.monotonic() > deadline:
                text = f"the model is not served yet: {lease.job.state_reason or 'a server is starting'}"
                raise ServiceError(Reason.SERVER_STARTING, text, retry_after_s=5.0)
            await self._clock.sleep(POLL_S)

    async def _renew(
        self, stub: SchedulerServiceStub, held: _Held, key: tuple[str, bytes]
    ) -> scheduler_service_pb2.RenewJobLeaseResponse:
        request = scheduler_service_pb2.RenewJobLeaseRequest(name=held.name)
        try:
            with typed_failures():
                lease = await stub.RenewJobLease(request, metadata=auth_metadata(held.caller.key))
        except ServiceError as error:
            if error.reason in (Reason.INVALID_STATE, Reason.JOB_NOT_FOUND):
                raise await self._ended(stub, held, key, error) from None
            raise
        held.lease, held.renewed, held.job_token = lease, self._clock.monotonic(), lease.job_token
        return lease

    async def _ended(
        self, stub: SchedulerServiceStub, held: _Held, key: tuple[str, bytes], error: ServiceError
    ) -> ServiceError:
        """The job is over: forget it, and say how it ended."""
        self._held.pop(key, None)
        with contextlib.suppress(ServiceError), typed_failures():
            request = scheduler_service_pb2.GetJobRequest(name=held.name)
            job = (await stub.GetJob(request, metadata=auth_metadata(held.caller.key))).job
            if job.state in _ENDED and job.error.code:
                return ServiceError.from_status(job.error)
        return ServiceError(Reason.SERVER_STARTING, f"the job that served it has ended: {error.message}")

    async def _finish(self, stub: SchedulerServiceStub, key: tuple[str, bytes], held: _Held) -> None:
        self._held.pop(key, None)
        request = scheduler_service_pb2.FinishJobRequest(
            name=held.name,
            request_id=f"finish-{held.name}",
            outcome=job_pb2.JOB_STATE_SUCCEEDED,
            message="nobody asked for it for a while",
        )
        # The lease ends what cannot be ended now.
        with contextlib.suppress(ServiceError), typed_failures():
            await stub.FinishJob(request, metadata=auth_metadata(held.caller.key), timeout=5.0)
        log.info("no longer serving on demand", job=held.name)
