"""How a trainer or inference server belongs to a cluster: one lease, renewed, and pushed assignments.

Runs in the front, beside no torch, so that a busy engine cannot starve a renewal. The server stops changing
anything when its own monotonic clock says that the lease is over (`holds_lease`), whatever the network says,
and is told (`on_lost`) when no scheduler answered for `lost_after_s`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio
import structlog

from opentinker_kit.clock import Clock, SystemClock
from opentinker_kit.logging import about
from opentinker_kit.metering import TokenMeter
from opentinker_kit.settings import ServerSettings
from opentinkerapi.runtime.calls import typed_errors
from opentinkerapi.runtime.channels import open_channel
from opentinkerapi.runtime.errors import OpenTinkerError, TlsFailed
from opentinkerapi.runtime.reasons import Reason
from opentinkerapi.runtime.tls import TlsFiles, explained
from opentinkerapi.scheduler.v1 import job_pb2, server_registry_service_pb2, server_registry_service_pb2_grpc

LOST_AFTER_S = 60.0
RECONNECT_S = 0.5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A slot given to a job under a fencing token; `policies` are to be restored first."""

    assignment: str
    job: str
    attempt: int
    policies: tuple[str, ...]


class AssignmentHandler(Protocol):
    """What the server does with what the scheduler pushes."""

    async def assign(self, assignment: Assignment) -> None:
        """Make the slot usable; the assignment is READY when this returns, FAILED when it raises.

        Called again for the same assignment after a reconnect: must be idempotent.
        """
        ...

    async def release(self, assignment: str, job: str) -> None:
        """Free everything of the assignment."""
        ...

    def request_drain(self, reason: str) -> None:
        """Begin an orderly end; returns at once."""
        ...

    def load(self) -> job_pb2.ServerLoad:
        """What the server does now."""
        ...


@dataclass(slots=True)
class Announcement:
    """What the server says of itself."""

    role: job_pb2.SlotRole.ValueType
    base_model: str
    base_digest: str
    options: job_pb2.ServerOptions
    slots: int
    advertise_address: str
    pid: int
    server_id: str = ""
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Registration:
    """Keeps the server registered until `stop`. `ready` and `failure` travel with the next renewal."""

    def __init__(
        self,
        settings: ServerSettings,
        announcement: Announcement,
        handler: AssignmentHandler,
        *,
        on_lost: Callable[[], None],
        clock: Clock | None = None,
        lost_after_s: float = LOST_AFTER_S,
        meter: TokenMeter | None = None,
    ) -> None:
        self._settings = settings
        self._meter = meter or TokenMeter()
        self._announcement = announcement
        self._handler = handler
        self._on_lost = on_lost
        self._clock = clock or SystemClock()
        self._lost_after_s = lost_after_s
        self._ready = False
        self._failure = ""
        self._changed = asyncio.Event()
        self._statuses: list[server_registry_service_pb2.AssignmentStatus] = []
        self._work: dict[str, asyncio.Task[None]] = {}
        self._last_seen = self._clock.monotonic()
        self._lease_until = 0.0
        self._open: object | None = None
        """The session that the scheduler is told through."""
        self._task: asyncio.Task[None] | None = None
        self._address = ""
        self._tls: TlsFiles | None = None
        self.server = ""
        self.attempt = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="registration")

    def set_ready(self) -> None:
        """The model is loaded and answers."""
        self._ready, self._failure = True, ""
        self._changed.set()

    def set_failed(self, message: str) -> None:
        """The server cannot become ready; the scheduler gives up on it and shows `message`."""
        self._ready, self._failure = False, message
        self._changed.set()

    def holds_lease(self) -> bool:
        """Whether this server may still change anything, by its own clock."""
        return self._clock.monotonic() < self._lease_until

    async def stop(self, reason: str = "shutting down") -> None:
        """End the lease; best effort where the scheduler does not answer."""
        tasks = [task for task in (self._task, *self._work.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lease_until = 0.0
        if not self.server:
            return
        with contextlib.suppress(grpc.RpcError, OSError, ValueError):
            async with self._channel() as channel:
                await server_registry_service_pb2_grpc.ServerRegistryServiceStub(channel).DeregisterServer(
                    server_registry_service_pb2.DeregisterServerRequest(
                        server=self.server, attempt=self.attempt, reason=reason
                    ),
                    timeout=2,
                )

    def _channel(self) -> grpc.aio.Channel:
        # Read anew each time: the scheduler may have moved, a certificate may have been replaced.
        self._address, self._tls = self._settings.resolve_scheduler_address(), self._settings.peer_files()
        return open_channel(self._address, key=self._settings.service_key(), tls=self._tls)

    async def _run(self) -> None:
        watchdog = asyncio.create_task(self._watch_scheduler(), name="registration-watchdog")
        try:
            while True:
                try:
                    with typed_errors():
                        await self._session()
                except OpenTinkerError as error:
                    if self._ended_by(await explained(error, self._address, self._tls)):
                        return
                except (OSError, ValueError) as error:
                    _log.warning("scheduler_unreachable", error=str(error))
                await asyncio.sleep(RECONNECT_S)
        finally:
            watchdog.cancel()

    def _ended_by(self, error: OpenTinkerError) -> bool:
        """Whether the scheduler has replaced this server, which must then go."""
        # With TLS set up wrongly no server ever registers: whoever reads the log has to see why.
        say = _log.error if isinstance(error, TlsFailed) else _log.info
        say("scheduler_session_ended", reason=str(error.reason), message=error.message)
        if error.reason == Reason.STALE_ATTEMPT:
            self._lease_until = 0.0
            self._handler.request_drain("another server took this one's place")
            return True
        return False

    async def _watch_scheduler(self) -> None:
        while self._clock.monotonic() - self._last_seen < self._lost_after_s:
            await self._clock.sleep(min(1.0, self._lost_after_s / 4))
        _log.error("scheduler_lost", seconds=self._lost_after_s)
        self._on_lost()

    async def _session(self) -> None:
        async with self._channel() as channel:
            stub = server_registry_service_pb2_grpc.ServerRegistryServiceStub(channel)
            announced = self._announcement
            answer = await stub.RegisterServer(
                server_registry_service_pb2.RegisterServerRequest(
                    instance_id=announced.instance_id,
                    server_id=announced.server_id,
                    role=announced.role,
                    base_model=announced.base_model,
                    base_digest=announced.base_digest,
                    options=announced.options,
                    slots=announced.slots,
                    advertise_address=announced.advertise_address,
                    pid=announced.pid,
                    ready=self._ready,
                ),
                timeout=10,
            )
            self.server, self.attempt = answer.server, answer.attempt
            ttl_s = answer.lease_ttl.ToTimedelta().total_seconds()
            self._extend(ttl_s)
            self._open = session = object()
            call = stub.ServerSession(self._messages(session, ttl_s / 3))
            try:
                messages = aiter(call)
                while (message := await self._next(messages, 2 * ttl_s / 3)) is not None:
                    self._receive(message)
            finally:
                self._open = None
                call.cancel()

    async def _next(
        self, messages: AsyncIterator[server_registry_service_pb2.ServerSessionResponse], patience_s: float
    ) -> server_registry_service_pb2.ServerSessionResponse | None:
        """What the scheduler says; None where it ended the session, or answered no renewal for so long.

        One that stands still keeps its connections. Another one may lead then, and would give this server up.
        """
        try:
            async with asyncio.timeout(patience_s):
                return await anext(messages, None)
        except TimeoutError:
            _log.warning("scheduler_silent", seconds=round(patience_s, 1))
            return None

    async def _messages(
        self, session: object, every_s: float
    ) -> AsyncIterator[server_registry_service_pb2.ServerSessionRequest]:
        """What to tell the scheduler, as long as `session` is open. gRPC asks once more after a stream ended:
        what it got then would reach nobody.
        """
        request = server_registry_service_pb2.ServerSessionRequest
        yield request(
            hello=server_registry_service_pb2.SessionHello(server=self.server, attempt=self.attempt)
        )
        # What an earlier session sent may not have arrived: the first renewal says all of it.
        first = True
        while session is self._open:
            self._changed.clear()
            while self._statuses and session is self._open:
                yield request(status=self._statuses.pop(0))
            counts = [
                job_pb2.TokenCount(job=job, trained=tokens.trained, sampled=tokens.sampled)
                for job, tokens in self._meter.changed(everything=first)
            ]
            first = False
            yield request(
                renewal=server_registry_service_pb2.SessionRenewal(
                    load=self._handler.load(), ready=self._ready, failure=self._failure, tokens=counts
                )
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._changed.wait()

    def _extend(self, ttl_s: float) -> None:
        self._last_seen = self._clock.monotonic()
        self._lease_until = self._last_seen + ttl_s

    def _receive(self, message: server_registry_service_pb2.ServerSessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "lease":
            self._extend(message.lease.ttl.ToTimedelta().total_seconds())
        elif kind == "assignment":
            pushed = message.assignment
            given = Assignment(pushed.assignment, pushed.job, pushed.attempt, tuple(pushed.policies))
            self._begin(given.assignment, self._assign(given))
        elif kind == "release":
            self._begin(message.release.assignment, self._release(message.release))
        elif kind == "drain":
            self._handler.request_drain(message.drain.reason)

    def _begin(self, assignment: str, work: Coroutine[None, None, None]) -> None:
        """Run `work` after what is already under way for the same assignment."""
        before = self._work.get(assignment)

        async def in_order() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await work

        self._work[assignment] = task = asyncio.create_task(in_order())
        task.add_done_callback(
            lambda done: self._work.pop(assignment) if self._work.get(assignment) is done else None
        )

    async def _assign(self, given: Assignment) -> None:
        try:
            with about(given.job):
                await self._handler.assign(given)
        except Exception as error:  # whatever it is, the scheduler must hear of it
            _log.exception("assignment_failed", assignment=given.assignment, job=given.job)
            self._report(given.assignment, server_registry_service_pb2.ASSIGNMENT_STATE_FAILED, str(error))
        else:
            _log.info("slot ready", job=given.job, assignment=given.assignment, attempt=given.attempt)
            self._report(given.assignment, server_registry_service_pb2.ASSIGNMENT_STATE_READY)

    async def _release(self, release: server_registry_service_pb2.Release) -> None:
        try:
            with about(release.job):
                await self._handler.release(release.assignment, release.job)
        except Exception:  # it is given up either way
            _log.exception("release_failed", assignment=release.assignment, job=release.job)
        else:
            _log.info("slot released", job=release.job, assignment=release.assignment)
        self._report(release.assignment, server_registry_service_pb2.ASSIGNMENT_STATE_RELEASED)

    def _report(
        self,
        assignment: str,
        state: server_registry_service_pb2.AssignmentState.ValueType,
        message: str = "",
    ) -> None:
        self._statuses.append(
            server_registry_service_pb2.AssignmentStatus(assignment=assignment, state=state, message=message)
        )
        self._changed.set()
