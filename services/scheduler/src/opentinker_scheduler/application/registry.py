"""Servers on their own behalf: register, stay alive, report, leave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.application.changes import end_assignment, end_server, restart_job
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.sessions import Lease, Session, Sessions
from opentinker_scheduler.application.usage import TokenCount, Usage
from opentinker_scheduler.domain.jobs import CrashBudget
from opentinker_scheduler.domain.model import (
    STATIC,
    AssignmentState,
    Failure,
    Role,
    Server,
    ServerOptions,
    ServerState,
)
from opentinker_scheduler.domain.names import new_id, require
from opentinker_scheduler.domain.records import Fact
from opentinker_scheduler.ports import Database, Transaction
from opentinkerapi.runtime.reasons import Reason

MAX_SLOTS, MAX_DIGEST = 1024, 80


@dataclass(frozen=True, slots=True)
class Registration:
    """What a server says of itself."""

    instance_id: str
    server_id: str
    role: Role
    base_model: str
    base_digest: str
    options: ServerOptions
    slots: int
    address: str
    pid: int
    ready: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a server last said it does."""

    running_requests: int = 0
    queued_requests: int = 0
    memory_bytes: int = 0


class Registry:
    """See the module's text."""

    def __init__(
        self,
        database: Database,
        leases: Leases,
        sessions: Sessions,
        budget: CrashBudget,
        clock: Clock,
        wake: Callable[[], None],
        usage: Usage,
    ) -> None:
        self._database = database
        self._leases = leases
        self._sessions = sessions
        self._budget = budget
        self._clock = clock
        self._wake = wake
        self._usage = usage
        self.loads: dict[str, Load] = {}

    async def register(self, asked: Registration) -> Server:
        """Grant a server its lease. The same process start gets the same server and attempt again."""
        if not 1 <= asked.slots <= MAX_SLOTS:
            text = f"slots is {asked.slots}; it must be from 1 to {MAX_SLOTS}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="slots")
        if len(asked.base_digest) > MAX_DIGEST:
            text = f"base_digest has {len(asked.base_digest)} characters; at most {MAX_DIGEST}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="base_digest")
        server = await self._database.run(lambda tx: self._register(tx, asked))
        self._leases.grant_server(server.id)
        self._wake()
        return server

    async def open_session(self, name: str, attempt: int) -> Session:
        """Begin a session. SERVER_NOT_FOUND or STALE_ATTEMPT where the lease is another's or over."""
        server = await self._database.run(lambda tx: self._live_server(tx, name, attempt))
        if not self._leases.renew_server(server.id):
            self._leases.grant_server(server.id)
        session = self._sessions.open(server.id)
        session.send(Lease(self._leases.server_ttl_s))
        self._wake()
        return session

    def close_session(self, session: Session) -> None:
        """The stream ended; the lease goes on until its time."""
        self._sessions.forget(session)

    async def renewed(
        self,
        session: Session,
        load: Load,
        ready: bool,
        failure: str,
        tokens: Sequence[TokenCount] = (),
    ) -> None:
        """A renewal came: extend the lease, note what changed. STALE_ATTEMPT if the lease was over."""
        if not self._leases.renew_server(session.server_id):
            raise ServiceError(
                Reason.STALE_ATTEMPT, "the lease of this server is over; register again", retry_after_s=0.0
            )
        self.loads[session.server_id] = load
        self._usage.heard(session.server_id, tokens)
        session.send(Lease(self._leases.server_ttl_s))
        # A thousand servers renew hundreds of times a second: only what is new reaches the database.
        if failure:
            await self._database.run(lambda tx: self._failed(tx, session.server_id, failure))
            self._wake()
        elif ready and not session.ready:
            await self._database.run(lambda tx: self._ready(tx, session.server_id))
            session.ready = True
            self._wake()

    async def reported(
        self, session: Session, assignment_id: str, state: AssignmentState | None, message: str
    ) -> None:
        """A server says how far an assignment is: READY, ENDED (freed), or None (it cannot be used)."""
        await self._database.run(
            lambda tx: self._report(tx, session.server_id, assignment_id, state, message)
        )
        self._wake()

    async def deregister(self, name: str, attempt: int, reason: str) -> None:
        """A server leaves. Its slots are free; jobs that had one start again elsewhere."""

        def run(tx: Transaction) -> str:
            server = self._live_server(tx, name, attempt)
            cause = Failure(Reason.LAUNCH_FAILED, f"{server.role} {name} left: {reason or 'no reason given'}")
            self._end(tx, server, cause)
            return server.id

        server_id = await self._database.run(run)
        self._leases.servers.release(server_id)
        self._sessions.end(server_id, "the server deregistered")
        self._wake()

    def _register(self, tx: Transaction, asked: Registration) -> Server:
        server = tx.servers.find_instance(asked.instance_id)
        if server is not None and not server.state.ended:
            return self._save_registered(tx, server, asked, server.attempt)
        launched = tx.servers.find(asked.server_id) if asked.server_id else None
        if launched is not None and launched.launched:
            # One id is one launch: a second process under it, or one that was given up, is not taken in.
            if launched.state is not ServerState.LAUNCHING or launched.instance_id:
                text = f"server {asked.server_id} is {launched.state.upper()}; this process is not its holder"
                raise ServiceError(Reason.STALE_ATTEMPT, text)
            return self._save_registered(tx, launched, asked, launched.attempt + 1)
        return self._add_static(tx, asked)

    def _add_static(self, tx: Transaction, asked: Registration) -> Server:
        older = [s for s in tx.servers.live() if s.own_id and s.own_id == asked.server_id]
        for server in older:
            cause = Failure(Reason.LAUNCH_FAILED, f"{server.role} {server.name} was started anew")
            self._end(tx, server, cause)
        attempt = max((server.attempt for server in older), default=0) + 1
        server = Server(
            id=new_id(),
            role=asked.role,
            base_model=asked.base_model,
            options=asked.options,
            state=ServerState.LAUNCHING,
            slots_total=asked.slots,
            launcher=STATIC,
            start_time=self._clock.now(),
            own_id=asked.server_id,
        )
        return self._save_registered(tx, tx.servers.add(server), asked, attempt)

    def _save_registered(self, tx: Transaction, server: Server, asked: Registration, attempt: int) -> Server:
        if server.role is not asked.role or server.base_model != asked.base_model:
            is_one = f"{server.name} is a {server.role} of {server.base_model}"
            text = f"{is_one}, not {asked.role} of {asked.base_model}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="base_model")
        first = server.register_time is None
        state = server.state
        if state in (ServerState.LAUNCHING, ServerState.REGISTERED):
            state = ServerState.READY if asked.ready else ServerState.REGISTERED
        now = self._clock.now()
        registered = replace(
            server,
            base_digest=asked.base_digest,
            reported=asked.options,
            state=state,
            address=asked.address,
            # A launched server was planned for its slots; it may offer more, and must not offer fewer.
            slots_total=server.slots_total if server.launched else asked.slots,
            attempt=attempt,
            instance_id=asked.instance_id,
            pid=server.pid or asked.pid,
            register_time=server.register_time or now,
        )
        if registered != server:
            tx.servers.save(registered)
        if first:
            fact = Fact("server_registered", server.name, detail={"address": asked.address})
            tx.outbox.add(fact, now)
        return registered

    def _live_server(self, tx: Transaction, name: str, attempt: int) -> Server:
        (server_id,) = require(name, Reason.SERVER_NOT_FOUND, "server", "servers")
        server = tx.servers.find(server_id)
        if server is None:
            raise ServiceError(Reason.SERVER_NOT_FOUND, f"there is no server {name}", field="server")
        if server.state.ended or server.attempt != attempt:
            text = f"{name} is {server.state.upper()} under attempt {server.attempt}; register again"
            raise ServiceError(Reason.STALE_ATTEMPT, text, metadata={"attempt": server.attempt})
        return server

    def _ready(self, tx: Transaction, server_id: str) -> None:
        server = tx.servers.find(server_id)
        if server is not None and server.state is ServerState.REGISTERED:
            tx.servers.save(replace(server, state=ServerState.READY))

    def _failed(self, tx: Transaction, server_id: str, failure: str) -> None:
        server = tx.servers.find(server_id)
        if server is not None and not server.state.ended:
            text = f"{server.role} {server.name} cannot start: {failure}"
            self._end(tx, server, Failure(Reason.LAUNCH_FAILED, text))

    def _report(
        self,
        tx: Transaction,
        server_id: str,
        assignment_id: str,
        state: AssignmentState | None,
        message: str,
    ) -> None:
        assignment = tx.assignments.find(assignment_id)
        if assignment is None or assignment.server_id != server_id:
            return
        now = self._clock.now()
        if state is AssignmentState.READY and assignment.state is AssignmentState.GRANTED:
            tx.assignments.save(replace(assignment, state=state, change_time=now))
        elif state is AssignmentState.ENDED and assignment.state is not AssignmentState.ENDED:
            held = assignment.state.held
            end_assignment(tx, assignment, message or "released", now)
            if held:
                cause = Failure(Reason.LAUNCH_FAILED, f"servers/{server_id} gave a slot back: {message}")
                restart_job(tx, assignment.job_id, cause, now, self._budget, counts=True)
        elif state is None and assignment.state.held:
            end_assignment(tx, assignment, message, now)
            text = (
                f"{assignment.role} servers/{server_id} cannot serve the job: {message or 'no reason given'}"
            )
            cause = Failure(Reason.LAUNCH_FAILED, text)
            restart_job(tx, assignment.job_id, cause, now, self._budget, counts=True)

    def _end(self, tx: Transaction, server: Server, cause: Failure) -> None:
        end_server(tx, server, cause, self._clock.now(), self._budget)
