"""Servers and their slots, as a plan fills them: what fits where, what may be started, what is left alone.

What holds for every placement: a demand gets all its slots or none; no slot is given twice; a server serves
only slots it accepts; replicas of one slot never share a server; an exclusive slot shares its server with no
other job; limits on servers are kept; what is kept for a larger job goes to others only as its hold allows.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opentinker_scheduler.domain.limits import Key, Limits
from opentinker_scheduler.domain.model import Cost, Role, ServerOptions
from opentinker_scheduler.domain.nodes import Pool
from opentinker_scheduler.domain.shares import NOTHING

Kind = tuple[Role, str]
"""Role and base model."""
Claim = tuple[str, tuple[str, ...]]
"""Engine of a server, and its GPUs."""


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
    project: str = "default"
    cost: Cost = NOTHING
    priority: int = 0
    since: float = 0.0
    limit_s: float | None = None
    """How long it can hold what it gets; None: nobody knows."""
    shape: Hashable = None
    """Equal for queued demands that fit or fail alike; by default their needs."""


@dataclass(slots=True)
class Hold:
    """What of a server is kept for a job that waits for more than is free."""

    job_id: str
    lends_s: float
    """Others may have what is kept if they end within so many seconds."""
    spare: int
    """Slots beside it, which others may have for as long as they like."""

    def lends(self, limit_s: float | None) -> bool:
        return limit_s is not None and limit_s <= self.lends_s


@dataclass(slots=True)
class Capacity:
    """A server that takes new work, as the snapshot has it. A plan changes it."""

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
    taken: dict[int, str] = field(default_factory=dict)
    """Who owns the other slots."""
    hold: Hold | None = None
    devices: tuple[str, ...] = ()
    """GPUs that it has."""
    warm: bool = False
    """Kept ready without jobs: the last to make room."""

    @property
    def kind(self) -> Kind:
        return (self.role, self.base_model)

    @property
    def idle(self) -> bool:
        """Whether it may be stopped to make room."""
        return self.launched and self.ready and not self.jobs

    def suits(self, need: Need) -> bool:
        """Whether it is the right kind of server."""
        if self.role is not need.role or self.base_model != need.base_model:
            return False
        return self.options == need.options if self.launched else self.options.accepts(need.options)

    def accepts(self, need: Need, job_id: str) -> bool:
        """Whether a slot for this need of this job is free here."""
        if not self.free or (job_id, need.slot_index) in self.replicas or not self.suits(need):
            return False
        if not (need.exclusive or self.exclusive):
            return True
        return not (self.jobs - {job_id})

    def keeps_from(self, need: Need, limit_s: float | None) -> bool:
        """Whether what is free here is kept for another job."""
        hold = self.hold
        return hold is not None and not hold.lends(limit_s) and (hold.spare < 1 or need.exclusive)

    def take(self, need: Need, demand: Demand) -> int:
        """Give a free slot to a need of a job; its number."""
        job_id = demand.job_id
        self.jobs.add(job_id)
        if need.role is Role.INFERENCE:
            self.replicas.add((job_id, need.slot_index))
        self.exclusive = self.exclusive or need.exclusive
        if self.hold is not None and not self.hold.lends(demand.limit_s):
            self.hold.spare -= 1
        slot = self.free.pop(0)
        self.taken[slot] = job_id
        return slot

    def copy(self) -> "Capacity":
        return replace(
            self,
            free=list(self.free),
            jobs=set(self.jobs),
            replicas=set(self.replicas),
            taken=dict(self.taken),
            hold=None if self.hold is None else replace(self.hold),
        )

    def restore(self, other: "Capacity") -> None:
        """Be as a copy is."""
        self.free, self.jobs, self.replicas = other.free, other.jobs, other.replicas
        self.exclusive, self.taken, self.hold = other.exclusive, other.taken, other.hold

    def without(self, jobs: Collection[str]) -> "Capacity":
        """As it is once these jobs have ended."""
        left = self.jobs - set(jobs)
        taken = {slot: job for slot, job in self.taken.items() if job in left}
        freed = [slot for slot, job in self.taken.items() if job not in left]
        return replace(
            self,
            free=sorted([*self.free, *freed]),
            jobs=left,
            replicas={place for place in self.replicas if place[0] in left},
            exclusive=self.exclusive and bool(left),
            taken=taken,
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot given to a need."""

    need: Need
    server_id: str
    slot_no: int


@dataclass(frozen=True, slots=True)
class NewServer:
    """A server to start."""

    server_id: str
    role: Role
    base_model: str
    options: ServerOptions
    slots: int
    devices: tuple[str, ...] = ()
    """Its GPUs, rank by rank."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What forbids a slot."""

    text: str
    engine: str = ""
    """Set where it is a limit on servers of this engine, so that only the end of one of them helps."""
    gpus: bool = False
    """Only the end of servers that have GPUs helps."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a job was not placed: the first need without a slot, and what stood in the way."""

    need: Need
    wanted: int
    obstacle: Obstacle


class Floor:
    """The servers as they would be after the grants so far. `running` counts the servers that exist, by
    engine; `leaving` those of them that are on their way out, whose GPUs are `coming`; `gpus` are free.
    """

    def __init__(
        self,
        servers: Iterable[Capacity],
        limits: Limits,
        running: Mapping[str, int],
        new_server_id: Callable[[], str],
        leaving: Mapping[str, int] | None = None,
        gpus: Pool | None = None,
        coming: Iterable[str] = (),
    ) -> None:
        self.servers = list(servers)
        self.limits = limits
        self.running = dict(running)
        self._new_server_id = new_server_id
        self.leaving = dict(leaving or {})
        self._gpus = Pool(limits.nodes) if gpus is None else gpus
        self._coming = set(coming)
        self.claims: list[Claim] = []
        """Of what is on its way out, what waits for somebody."""
        self._free: dict[Kind, list[Capacity]] = {}
        for server in self.servers:
            if server.free:
                self._free.setdefault(server.kind, []).append(server)
        self.launched: list[NewServer] = []
        self.evicted: list[str] = []
        self._kept: list[tuple[NewServer, Hold]] = []
        """Servers that are still to be started for others, and for whom."""

    def place(self, demand: Demand) -> tuple[Placement, ...] | Shortage:
        """All of a job's slots, taken; or why not, with nothing changed."""
        before: dict[str, tuple[Capacity, Capacity]] = {}
        started = len(self.launched)
        placements: dict[Need, Placement] = {}
        for need in self._largest_first(demand.needs):
            server = self._find(need, demand) or self.launch(need, demand)
            if isinstance(server, Obstacle):
                self._undo(before.values(), started)
                return Shortage(need, sum(other.key == need.key for other in demand.needs), server)
            if server.server_id not in before:
                before[server.server_id] = (server, server.copy())
            placements[need] = Placement(need, server.server_id, server.take(need, demand))
        for kind in {(need.role, need.base_model) for need in demand.needs}:
            self._free[kind] = [server for server in self._free.get(kind, ()) if server.free]
        return tuple(placements[need] for need in demand.needs)

    def after(
        self, servers: Iterable[Capacity], stopped: Collection[Capacity], claims: Iterable[Claim] = ()
    ) -> "Floor":
        """A floor of these servers once those that are leaving and these others are gone, and the claims
        have what they wait for."""
        running = Counter(self.running)
        running.subtract(self.leaving)
        running.subtract(one.options.engine for one in stopped)
        gpus = self._gpus.copy()
        gpus.give_back(self._coming)
        gpus.give_back(device for one in stopped for device in one.devices)
        gpus.take(device for new, _ in self._kept for device in new.devices)
        for engine, devices in claims:
            running[engine] += 1
            gpus.take(devices)
        return Floor(servers, self.limits, running, lambda: "later", gpus=gpus)

    def has_gpus_for(self, need: Need) -> bool:
        """Whether enough of them are free for a new server."""
        return self._gpus.find(self.limits.ask(need.role, need.options)) is not None

    def free(self, kind: Kind) -> Sequence[Capacity]:
        """Servers of a kind with free slots."""
        return self._free.get(kind, ())

    def idle(self) -> list[Capacity]:
        """Servers that may be stopped: they have no work, and are kept for nobody."""
        return [one for line in self._free.values() for one in line if one.idle and one.hold is None]

    def evict(self, server: Capacity) -> None:
        """Have an idle server stop."""
        self._free[server.kind].remove(server)
        self.servers.remove(server)
        self.evicted.append(server.server_id)
        engine = server.options.engine
        self.leaving[engine] = self.leaving.get(engine, 0) + 1
        self._coming |= set(server.devices)

    def keep(self, server: NewServer, hold: Hold) -> None:
        """Leave room for a server to be started for a job."""
        self._kept.append((server, hold))

    def _largest_first(self, needs: Sequence[Need]) -> Sequence[Need]:
        """So that servers of few GPUs are not in the way of those of many."""
        if not self.limits.gives_gpus:
            return needs
        return sorted(needs, key=lambda need: -self.limits.ask(need.role, need.options).total)

    def _find(self, need: Need, demand: Demand) -> Capacity | None:
        fitting = [
            server
            for server in self._free.get((need.role, need.base_model), ())
            if server.accepts(need, demand.job_id) and not server.keeps_from(need, demand.limit_s)
        ]
        # Fill what is loaded and nearly full first, so that empty servers stay empty and can be stopped.
        return min(fitting, key=lambda server: (not server.ready, len(server.free)), default=None)

    def launch(self, need: Need, demand: Demand) -> Capacity | Obstacle:
        """A new server for this need, or what forbids one."""
        devices = self._devices(need, demand)
        if isinstance(devices, Obstacle):
            return devices
        slots = self.limits.slots_of(need.role, need.options)
        server = Capacity(
            self._new_server_id(), *need.key, free=list(range(slots)), ready=False, devices=devices
        )
        self._gpus.take(devices)
        self.servers.append(server)
        self._free.setdefault(server.kind, []).append(server)
        self.launched.append(NewServer(server.server_id, *need.key, slots, devices))
        engine = need.options.engine
        self.running[engine] = self.running.get(engine, 0) + 1
        return server

    def _devices(self, need: Need, demand: Demand) -> tuple[str, ...] | Obstacle:
        """The GPUs of a new server, or what forbids one."""
        limit = self._limit(need, demand)
        if not isinstance(limit, Obstacle):
            return limit
        beside = self.free((need.role, need.base_model))
        held = any(server.hold is not None and server.accepts(need, demand.job_id) for server in beside)
        return _kept_for(gpus=limit.gpus) if held else limit

    def _limit(self, need: Need, demand: Demand) -> tuple[str, ...] | Obstacle:
        limits, engine = self.limits, need.options.engine
        if not limits.can_launch:
            return Obstacle("no registered server has them free")
        engine_limit = limits.max_engine_servers.get(engine)
        of_engine, of_all = self.running.get(engine, 0), sum(self.running.values())
        if engine_limit is not None and of_engine >= engine_limit:
            return Obstacle(f"the limit max_engine_servers[{engine}]={engine_limit} is reached", engine)
        if of_all >= limits.max_servers:
            return Obstacle(f"the limit max_servers={limits.max_servers} is reached")
        kept = [new for new, hold in self._kept if not hold.lends(demand.limit_s)]
        same = sum(new.options.engine == engine for new in kept)
        if same and engine_limit is not None and of_engine + same >= engine_limit:
            return _kept_for()
        if kept and of_all + len(kept) >= limits.max_servers:
            return _kept_for()
        ask = limits.ask(need.role, need.options)
        if (free := self._gpus.find(ask)) is None:
            free_text = "free on no node" if ask.ranks == 1 else "not free"
            return Obstacle(f"{ask.describe()} {'is' if ask.total == 1 else 'are'} {free_text}", gpus=True)
        kept_devices = {device for new in kept for device in new.devices}
        if kept_devices.isdisjoint(free):
            return free
        others = self._gpus.find(ask, kept_devices)
        return _kept_for(gpus=True) if others is None else others

    def _undo(self, before: Iterable[tuple[Capacity, Capacity]], started: int) -> None:
        for server, copy in before:
            server.restore(copy)
        for new in self.launched[started:]:
            kind = (new.role, new.base_model)
            self._free[kind] = [server for server in self._free[kind] if server.server_id != new.server_id]
            self.servers = [server for server in self.servers if server.server_id != new.server_id]
            self.running[new.options.engine] -= 1
            self._gpus.give_back(new.devices)
        del self.launched[started:]


def _kept_for(*, gpus: bool = False) -> Obstacle:
    # Without its name: it may be another project's.
    text = "what is free is kept for a job that waits for more; jobs with a short max_duration may go before"
    return Obstacle(text, gpus=gpus)
