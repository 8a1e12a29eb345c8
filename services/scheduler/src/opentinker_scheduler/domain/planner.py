"""Which waiting job gets which slots: one pure decision over a snapshot, made by each tick.

What holds for every plan: a demand gets all its slots or none; no slot is given twice; a server serves only
slots it accepts; replicas of one slot never share a server; an exclusive slot shares its server with no other
job; limits on servers are kept; at most `max_grants` demands are placed. Jobs that lost slots go first, then
the queue in order; one that does not fit is passed over, so that a large job does not block a small one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentinker_scheduler.domain.model import Role, ServerOptions, SlotSpec

Key = tuple[Role, str, ServerOptions]


@dataclass(frozen=True, slots=True)
class Need:
    """One slot that a job lacks."""

    slot_index: int
    ordinal: int
    role: Role
    base_model: str
    options: ServerOptions
    exclusive: bool = False

    @property
    def key(self) -> Key:
        return (self.role, self.base_model, self.options)


@dataclass(frozen=True, slots=True)
class Demand:
    """Slots that a job lacks and gets together: all of a queued one's; of one that lost slots (`queued` is
    False) those that it needs to go on, and apart from them spare replicas.
    """

    job_id: str
    needs: tuple[Need, ...]
    queued: bool = True


@dataclass(slots=True)
class Capacity:
    """A server that takes new work, as the snapshot has it. The plan works on copies."""

    server_id: str
    role: Role
    base_model: str
    options: ServerOptions
    free: list[int]
    """Free slot numbers."""
    jobs: set[str] = field(default_factory=set)
    """Jobs that own slots, or whose slots are still being freed."""
    replicas: set[tuple[str, int]] = field(default_factory=set)
    """(job, slot index) of the inference slots among them."""
    exclusive: bool = False
    """One of those slots is exclusive."""
    launched: bool = True
    """We started it: only slots that ask for exactly its options share it."""
    ready: bool = True

    def accepts(self, need: Need, job_id: str) -> bool:
        """Whether a slot for this need of this job may be taken here now."""
        if not self.free or self.role is not need.role or self.base_model != need.base_model:
            return False
        if (job_id, need.slot_index) in self.replicas:
            return False
        same = self.options == need.options if self.launched else self.options.accepts(need.options)
        others = bool(self.jobs - {job_id})
        return same and not (others and (need.exclusive or self.exclusive))

    def take(self, need: Need, job_id: str) -> int:
        """Give a free slot to a need of a job; its number."""
        self.jobs.add(job_id)
        if need.role is Role.INFERENCE:
            self.replicas.add((job_id, need.slot_index))
        self.exclusive = self.exclusive or need.exclusive
        return self.free.pop(0)


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be started."""

    can_launch: bool = True
    max_servers: int = 32
    max_engine_servers: Mapping[str, int] = field(default_factory=dict)
    max_grants: int = 100
    trainer_slots: int = 8
    inference_slots: int = 8
    merged_slots: int = 1

    def slots_of(self, role: Role, options: ServerOptions) -> int:
        """Slots that a server is started with; a merged one serves one policy at a time."""
        if role is Role.TRAINER:
            return self.trainer_slots
        return self.merged_slots if options.serving_mode == "merged" else self.inference_slots

    def servers_needed(self, slots: Sequence[SlotSpec]) -> Mapping[Key, int]:
        """How many servers of each kind an empty cluster would start for a job."""
        counts: dict[Key, int] = {}
        replicas: dict[Key, int] = {}
        for spec in slots:
            key = (spec.role, spec.base_model, spec.options)
            counts[key] = counts.get(key, 0) + spec.count
            if spec.role is Role.INFERENCE:
                replicas[key] = max(replicas.get(key, 0), spec.count)
        return {
            key: max(-(-count // self.slots_of(key[0], key[2])), replicas.get(key, 0))
            for key, count in counts.items()
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot given to a need."""

    need: Need
    server_id: str
    slot_no: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Everything a job lacked."""

    job_id: str
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class NewServer:
    """A server to start."""

    server_id: str
    role: Role
    base_model: str
    options: ServerOptions
    slots: int


@dataclass(slots=True)
class Plan:
    """What to do now, and what to tell those who wait."""

    grants: list[Grant] = field(default_factory=list)
    launches: list[NewServer] = field(default_factory=list)
    evictions: list[str] = field(default_factory=list)
    """Idle servers to stop, so that others can start."""
    waiting: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Position in the queue (0 for jobs that only lost slots) and reason, by job."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What forbids a new server."""

    text: str
    engine: str = ""
    """Set where it is a limit on servers of this engine, so that only the end of one of them helps."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a job was not placed: the first need without a slot, and what stood in the way."""

    need: Need
    wanted: int
    obstacle: Obstacle


def make_plan(
    demands: Iterable[Demand],
    servers: Iterable[Capacity],
    limits: Limits,
    running: Mapping[str, int],
    new_server_id: Callable[[], str],
) -> Plan:
    """Place what fits. `demands` come in queue order; `running` counts the servers that exist, by engine."""
    floor = _Floor(servers, limits, running, new_server_id)
    plan = Plan()
    ordered = sorted(demands, key=lambda demand: demand.queued)
    position = 0
    for demand in ordered:
        placed: tuple[Placement, ...] | Shortage | None = None
        if len(plan.grants) < limits.max_grants:
            placed = floor.place(demand)
        if isinstance(placed, tuple):
            plan.grants.append(Grant(demand.job_id, placed))
            continue
        position += demand.queued
        ahead = position - 1 if demand.queued else 0
        told = (position if demand.queued else 0, _reason(placed, ahead))
        # Of a job with two demands the first says what matters more.
        plan.waiting.setdefault(demand.job_id, told)
    plan.launches = floor.launched
    plan.evictions = floor.evicted
    return plan


class _Floor:
    """The servers as they would be after the grants so far."""

    def __init__(
        self,
        servers: Iterable[Capacity],
        limits: Limits,
        running: Mapping[str, int],
        new_server_id: Callable[[], str],
    ) -> None:
        self._servers = [_copy(server) for server in servers]
        self._limits = limits
        self._running = dict(running)
        self._new_server_id = new_server_id
        self.launched: list[NewServer] = []
        self.evicted: list[str] = []

    def place(self, demand: Demand) -> tuple[Placement, ...] | Shortage:
        """All of a job's slots, taken; or why not, with nothing changed but idle servers marked to go."""
        with self._attempt() as attempt:
            placements: list[Placement] = []
            for need in demand.needs:
                server = self._find(need, demand.job_id) or self._launch(need)
                if isinstance(server, Obstacle):
                    shortage = Shortage(need, sum(other.key == need.key for other in demand.needs), server)
                    break
                placements.append(Placement(need, server.server_id, server.take(need, demand.job_id)))
            else:
                attempt.keep = True
                return tuple(placements)
        self._evict_for(demand, shortage)
        return shortage

    def _find(self, need: Need, job_id: str) -> Capacity | None:
        fitting = [server for server in self._servers if server.accepts(need, job_id)]
        # Fill what is loaded and nearly full first, so that empty servers stay empty and can be stopped.
        return min(fitting, key=lambda server: (not server.ready, len(server.free)), default=None)

    def _launch(self, need: Need) -> Capacity | Obstacle:
        """A new server for this need, or what forbids one."""
        obstacle = self._obstacle(need)
        if obstacle is not None:
            return obstacle
        slots = self._limits.slots_of(need.role, need.options)
        server = Capacity(
            self._new_server_id(), *need.key, free=list(range(slots)), launched=True, ready=False
        )
        self._servers.append(server)
        self.launched.append(NewServer(server.server_id, *need.key, slots))
        engine = need.options.engine
        self._running[engine] = self._running.get(engine, 0) + 1
        return server

    def _obstacle(self, need: Need) -> Obstacle | None:
        if not self._limits.can_launch:
            return Obstacle("no registered server has them free")
        engine = need.options.engine
        engine_limit = self._limits.max_engine_servers.get(engine)
        if engine_limit is not None and self._running.get(engine, 0) >= engine_limit:
            return Obstacle(f"the limit max_engine_servers[{engine}]={engine_limit} is reached", engine)
        if sum(self._running.values()) >= self._limits.max_servers:
            return Obstacle(f"the limit max_servers={self._limits.max_servers} is reached")
        return None

    def _evict_for(self, demand: Demand, shortage: Shortage) -> None:
        """Mark idle servers to stop where a limit on servers is what keeps a job waiting."""
        if not self._limits.can_launch:
            return
        wanted = {need.key for need in demand.needs}
        for server in list(self._servers):
            idle = server.launched and server.ready and not server.jobs
            useful = (server.role, server.base_model, server.options) in wanted
            fits = shortage.obstacle.engine in ("", server.options.engine)
            if idle and fits and not useful:
                self._servers.remove(server)
                self.evicted.append(server.server_id)
                return

    @contextmanager
    def _attempt(self) -> Iterator["_Attempt"]:
        """Undo everything at the end of the block unless it was kept."""
        attempt = _Attempt()
        servers = [_copy(server) for server in self._servers]
        launched, running = list(self.launched), dict(self._running)
        yield attempt
        if not attempt.keep:
            self._servers, self.launched, self._running = servers, launched, running


@dataclass(slots=True)
class _Attempt:
    keep: bool = False


def _copy(server: Capacity) -> Capacity:
    return Capacity(
        server.server_id,
        server.role,
        server.base_model,
        server.options,
        list(server.free),
        set(server.jobs),
        set(server.replicas),
        server.exclusive,
        server.launched,
        server.ready,
    )


def _reason(shortage: Shortage | None, ahead: int) -> str:
    """What a waiting job waits for, in words a person can act on."""
    if shortage is None:
        return "waiting to be placed: the scheduler places at most its limit of jobs a tick"
    need = shortage.need
    engine = f" on {need.options.engine}" if need.options.engine else ""
    slots = f"{shortage.wanted} {need.role} {'slot' if shortage.wanted == 1 else 'slots'}"
    apart = ", each on a server of its own" if need.role is Role.INFERENCE and shortage.wanted > 1 else ""
    queue = f"; {ahead} {'job' if ahead == 1 else 'jobs'} ahead" if ahead else ""
    return f"waiting for {slots} of {need.base_model}{engine}{apart}: {shortage.obstacle.text}{queue}"
