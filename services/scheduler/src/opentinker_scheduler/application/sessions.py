"""Open sessions with servers: what each was told. Telling is level-triggered: the tick compares what a server
should hold with what its session has sent, so a new session is told everything again, an old one nothing
twice.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.domain.model import Assignment, AssignmentState
from opentinkerapi.runtime.reasons import Reason


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease goes on for so long."""

    ttl_s: float


@dataclass(frozen=True, slots=True)
class Assign:
    """A slot is given."""

    assignment: Assignment
    policies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A slot is taken back."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Drain:
    """The server must end."""

    reason: str


Down = Lease | Assign | Release | Drain

_QUEUE_SIZE = 4096


@dataclass(slots=True)
class Session:
    """One open stream."""

    server_id: str
    queue: asyncio.Queue[Down | None] = field(default_factory=lambda: asyncio.Queue(_QUEUE_SIZE))
    assigned: set[str] = field(default_factory=set)
    released: set[str] = field(default_factory=set)
    draining: bool = False
    ready: bool = False
    """Its server said that it is ready, and that is written down."""
    end: Exception | None = None

    def send(self, message: Down) -> None:
        """Queue a message; a server that reads nothing loses its session, and with it its lease."""
        if self.end is not None:
            return
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.close(ServiceError(Reason.OVERLOADED, "the session is not read; open a new one"))

    def close(self, end: Exception | None) -> None:
        """End the stream, with an error for its server or without."""
        if self.end is None:
            self.end = end
        while True:
            try:
                self.queue.put_nowait(None)
            except asyncio.QueueFull:
                self.queue.get_nowait()
            else:
                return

    async def messages(self) -> AsyncIterator[Down]:
        """What to send down, until the session is closed."""
        while (message := await self.queue.get()) is not None:
            yield message
        if self.end is not None:
            raise self.end


class Sessions:
    """The newest session of each server."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._closed = False

    def open(self, server_id: str) -> Session:
        """A new session; an older one of the same server ends."""
        if self._closed:
            raise ServiceError(Reason.DRAINING, "the scheduler is stopping; connect again", retry_after_s=1.0)
        if older := self._sessions.get(server_id):
            older.close(ServiceError(Reason.STALE_ATTEMPT, "a newer session of this server was opened"))
        session = Session(server_id)
        self._sessions[server_id] = session
        return session

    def forget(self, session: Session) -> None:
        """The stream ended."""
        if self._sessions.get(session.server_id) is session:
            del self._sessions[session.server_id]

    def end(self, server_id: str, reason: str) -> None:
        """The server's lease is over: its session says so."""
        if session := self._sessions.pop(server_id, None):
            session.close(ServiceError(Reason.STALE_ATTEMPT, reason))

    def interrupt(self, reason: str) -> None:
        """End all sessions with STORAGE_UNAVAILABLE; their servers look for a scheduler that leads."""
        for session in self._sessions.values():
            session.close(ServiceError(Reason.STORAGE_UNAVAILABLE, reason, retry_after_s=1.0))

    def close(self) -> None:
        """End all sessions with DRAINING."""
        self._closed = True
        for session in self._sessions.values():
            session.close(ServiceError(Reason.DRAINING, "the scheduler is stopping", retry_after_s=1.0))

    def told(self) -> Mapping[str, frozenset[str]]:
        """Assignments that each open session was told of."""
        return {server_id: frozenset(session.assigned) for server_id, session in self._sessions.items()}

    def sync(self, active: Iterable[Assignment], policies: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Tell servers of assignments they were not told of, and of releases; ids of newly sent releases.

        `policies` holds, by job, the policies to restore; assignments whose job is missing there wait.
        """
        sent: list[str] = []
        for assignment in active:
            session = self._sessions.get(assignment.server_id)
            if session is None:
                continue
            if assignment.state is AssignmentState.RELEASING:
                if assignment.id not in session.released:
                    session.released.add(assignment.id)
                    session.send(Release(assignment))
                    sent.append(assignment.id)
            elif assignment.id not in session.assigned and assignment.job_id in policies:
                session.assigned.add(assignment.id)
                session.send(Assign(assignment, policies[assignment.job_id]))
        return sent

    def drain(self, server_id: str, reason: str) -> None:
        """Ask a server to end."""
        session = self._sessions.get(server_id)
        if session is not None and not session.draining:
            session.draining = True
            session.send(Drain(reason))
