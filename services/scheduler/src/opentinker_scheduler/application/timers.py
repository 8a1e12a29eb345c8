"""How long things have been as they are, on the leader's monotonic clock: what is late, overdue or idle."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentinker_scheduler.domain.model import Assignment, AssignmentState, Server, ServerState


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things may take, in seconds."""

    tick_s: float = 0.2
    register_s: float = 180.0
    ready_s: float = 900.0
    release_s: float = 60.0
    idle_s: float = 300.0
    stop_grace_s: float = 10.0


class Timers:
    """Since when, as far as this process saw. A restarted scheduler starts to count anew."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._launching: dict[str, float] = {}
        self._loading: dict[str, float] = {}
        self._idle: dict[str, float] = {}
        self._releases: dict[str, float] = {}

    def see(self, servers: Sequence[Server], assignments: Sequence[Assignment], now: float) -> None:
        """Take note of how things stand."""
        busy = {assignment.server_id for assignment in assignments}
        launching = {s.id for s in servers if s.state is ServerState.LAUNCHING and s.pid}
        loading = {s.id for s in servers if s.state is ServerState.REGISTERED}
        idle = {s.id for s in servers if s.launched and s.state is ServerState.READY and s.id not in busy}
        releasing = {a.id for a in assignments if a.state is AssignmentState.RELEASING}
        self._launching = _since(self._launching, launching, now)
        self._loading = _since(self._loading, loading, now)
        self._idle = _since(self._idle, idle, now)
        self._releases = {key: at for key, at in self._releases.items() if key in releasing}

    def release_sent(self, assignment_id: str, now: float) -> None:
        """A server was told to free a slot."""
        self._releases.setdefault(assignment_id, now)

    def late(self, now: float) -> list[tuple[str, str]]:
        """Servers that took too long, and for what."""
        register_s, ready_s = self._timing.register_s, self._timing.ready_s
        unregistered = [
            (server_id, f"did not register within {register_s:g} s")
            for server_id in _older(self._launching, register_s, now)
        ]
        unready = [
            (server_id, f"did not load its model within {ready_s:g} s")
            for server_id in _older(self._loading, ready_s, now)
        ]
        return unregistered + unready

    def overdue(self, now: float) -> list[str]:
        """Assignments whose slots were not freed in time."""
        return _older(self._releases, self._timing.release_s, now)

    def idle(self, now: float) -> list[str]:
        """Servers without work for too long."""
        return _older(self._idle, self._timing.idle_s, now)


def _since(known: dict[str, float], present: set[str], now: float) -> dict[str, float]:
    return {key: known.get(key, now) for key in present}


def _older(since: dict[str, float], limit_s: float, now: float) -> list[str]:
    return [key for key, at in since.items() if now - at >= limit_s]
