"""A cluster around a real scheduler core: its machines, servers, bus and database, each of which can fail.

The core is built of its real parts over real SQLite; what is simulated is outside of it, behind its ports.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinker_kit.events import OutboxRelay
from opentinker_kit.job_tokens import TokenSigner
from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.adapters.sql.engines import Location
from opentinker_scheduler.application.answers import Answers
from opentinker_scheduler.application.cluster import Cluster
from opentinker_scheduler.application.jobs import Jobs
from opentinker_scheduler.application.leases import Leases
from opentinker_scheduler.application.logs import Logs
from opentinker_scheduler.application.placing import Placing, Terms
from opentinker_scheduler.application.reconciler import Reconciler
from opentinker_scheduler.application.registry import Load, Registration, Registry
from opentinker_scheduler.application.sessions import Assign, Drain, Release, Session, Sessions
from opentinker_scheduler.application.timers import Timing
from opentinker_scheduler.application.tokens import JobTokens
from opentinker_scheduler.application.usage import Usage
from opentinker_scheduler.application.watch import JobWatchers
from opentinker_scheduler.bootstrap import SqlOutboxSource
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.admission import Model, Offer
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import Assignment, AssignmentState, Role, Server
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.shares import Tenants
from opentinker_scheduler.launcher_ports import Started
from opentinker_scheduler.log_ports import LogPart
from opentinker_scheduler.ports import Transaction
from opentinker_scheduler.servicers.jobs import SchedulerServicer
from opentinkerapi.events.v1 import event_pb2

T = TypeVar("T")
SLOTS, SERVERS = 2, 3
NODES = (Node("a", 2), Node("b", 1))
LIMITS = Limits(
    max_servers=SERVERS,
    trainer_slots=SLOTS,
    inference_slots=SLOTS,
    reserve_after_s=5.0,
    engine_gpus={"noop": 1},
)
OFFER = Offer(
    limits=LIMITS,
    engines=dict.fromkeys(Role, ("noop",)),
    default_engines=dict.fromkeys(Role, "noop"),
    install_hints={},
    default_dtypes={"noop": "float32"},
    default_serving_modes={"noop": "adapter"},
)
TERMS = Terms(
    limits=LIMITS,
    tenants=Tenants(),
    budget=rules.CrashBudget(limit=5),
    launcher_name="process",
    preemption=True,
    preempt_after_s=2.0,
)
# Slots are only freed by who holds them or dies: what is taken back by force may still be held.
TIMING = Timing(tick_s=0.2, register_s=60.0, ready_s=60.0, release_s=1e9, idle_s=30.0, stop_grace_s=1.0)
SERVER_TTL_S = 15.0


class Fault(Exception):
    """The injected fault."""


class FaultyDatabase:
    """Fails the next transaction where it is told to: `lost`, with all that it did, or `unanswered`, when it
    is kept and nobody hears of it.
    """

    def __init__(self, path: Location) -> None:
        self.real = SqlDatabase(path)
        self.next = ""

    async def run(self, work: Callable[[Transaction], T]) -> T:
        fault, self.next = self.next, ""

        def broken(tx: Transaction) -> T:
            work(tx)
            raise Fault

        result = await self.real.run(broken if fault == "lost" else work)
        if fault == "unanswered":
            raise Fault
        return result


class FaultyBus:
    """Keeps what it is given, unless it is down."""

    def __init__(self) -> None:
        self.down = False
        self.events: list[event_pb2.Event] = []

    async def deliver(self, event: event_pb2.Event, msg_id: str = "", timeout_s: float = 2.0) -> bool:
        if self.down:
            return False
        self.events.append(event)
        return True


@dataclass
class Process:
    """A server's process, as long as it runs. `holds` is what it was given and did not free."""

    server: Server
    instance: str
    alive: bool = True
    silent: bool = False
    """It neither renews nor reports: stuck, or cut off."""
    session: Session | None = None
    holds: dict[str, Assignment] = field(default_factory=dict)
    unsaid: list[tuple[str, AssignmentState]] = field(default_factory=list)
    said: list[tuple[str, AssignmentState]] = field(default_factory=list)
    drains: bool = False

    def registration(self) -> Registration:
        server = self.server
        address = f"host:{self.instance}"
        return Registration(
            self.instance,
            server.id,
            server.role,
            server.base_model,
            "",
            server.options,
            SLOTS,
            address,
            1,
            True,
        )

    def read(self) -> None:
        """Take what the session sent."""
        while self.session is not None and not self.session.queue.empty():
            match self.session.queue.get_nowait():
                case Assign(assignment=given):
                    self.holds[given.id] = given
                    self.unsaid.append((given.id, AssignmentState.READY))
                case Release(assignment=taken):
                    self.unsaid.append((taken.id, AssignmentState.ENDED))
                case Drain():
                    self.drains = True
                case None:
                    self.session = None
                case _:
                    pass


class Machines:
    """Processes, which outlive schedulers; a launcher over them."""

    name, can_launch = "process", True

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.refuses = False
        self.on_exit: Callable[[str, int | None], None] = lambda server_id, code: None

    @property
    def alive(self) -> list[Process]:
        return sorted((one for one in self.processes.values() if one.alive), key=lambda one: one.instance)

    def nodes(self) -> Sequence[Node]:
        return NODES

    async def start(self, server: Server) -> Started:
        if self.refuses:
            self.refuses = False
            raise OSError("no memory left")
        if server.id not in self.processes:
            self.processes[server.id] = Process(server, instance=f"i{len(self.processes)}")
        return self._started(server.id)

    def _started(self, server_id: str) -> Started:
        number = list(self.processes).index(server_id) + 1
        return Started(number, float(number), Path("log"))

    async def adopt(self, servers: Sequence[Server]) -> Mapping[str, Started]:
        known = {server.id for server in servers}
        for process in self.alive:
            if process.server.id not in known:
                process.alive = False
        return {one.server.id: self._started(one.server.id) for one in self.alive}

    async def stop(self, server_id: str, grace_s: float) -> None:
        process = self.processes.get(server_id)
        if process is not None and process.alive:
            process.alive = False
            self.on_exit(server_id, 0)

    def waits(self) -> Mapping[str, str]:
        return {}

    def watched(self) -> Collection[str]:
        return [process.server.id for process in self.alive]

    def log_tail(self, server_id: str) -> str:
        return ""

    async def read_log(self, server_id: str, offset: int, limit: int) -> LogPart | None:
        return None

    def close(self) -> None:
        self.on_exit = lambda server_id, code: None


class AnyModel:
    """Knows every model by name and reads no disk."""

    async def resolve(self, model_id: str, field: str) -> Model:
        return Model(model_id, 2048)

    async def known(self) -> list[str]:
        return []


class Core:
    """One scheduler's life over a database file, machines and a bus that were there before it."""

    def __init__(self, path: Location, clock: ManualClock, machines: Machines, bus: FaultyBus) -> None:
        self.database = FaultyDatabase(path)
        self.machines = machines
        leases, sessions = Leases(clock, SERVER_TTL_S), Sessions()
        placing = Placing(TERMS)
        database: Any = self.database
        self.reconciler = Reconciler(database, machines, leases, sessions, placing, TIMING, clock)
        machines.on_exit = self.reconciler.exited
        usage = Usage(database, clock)
        wake = self.reconciler.wake
        self.registry = Registry(database, leases, sessions, TERMS.budget, clock, wake, usage)
        models, answers = AnyModel(), Answers(database, clock)
        tokens = JobTokens(TokenSigner("a secret of tests"), clock)
        jobs = Jobs(OFFER, models, leases, tokens, clock, 600.0, Tenants())
        cluster = Cluster(database, OFFER, models, version="", env_host_address="", gateway_address="")
        self.api = SchedulerServicer(
            database,
            answers,
            jobs,
            JobWatchers(database),
            cluster,
            self.registry,
            leases,
            Logs(database, machines),
            clock,
            wake,
        )
        relayed: Any = bus
        self.relay = OutboxRelay(SqlOutboxSource(database), relayed)

    async def connect(self, process: Process) -> None:
        """Register a process and open its session, if it has none."""
        process.read()
        if process.session is not None:
            return
        try:
            server = await self.registry.register(process.registration())
            process.session = await self.registry.open_session(server.name, server.attempt)
        except ServiceError:
            # It was given up: it ends, as a real one does.
            process.alive = False
            self.machines.on_exit(process.server.id, 1)

    async def renew(self, process: Process) -> None:
        process.read()
        if process.session is None:
            return
        try:
            await self.registry.renewed(process.session, Load(), ready=True, failure="")
        except ServiceError:
            process.session = None

    async def report(self, process: Process, number: int) -> None:
        """Say one of the things that were not said yet."""
        assignment, state = process.unsaid.pop(number)
        if process.session is None:
            process.unsaid.insert(number, (assignment, state))
            return
        if state is AssignmentState.ENDED:
            process.holds.pop(assignment, None)
        process.said.append((assignment, state))
        try:
            await self.registry.reported(process.session, assignment, state, "")
        except Fault:
            # Its session broke over it: it says everything again in the next one.
            process.unsaid.append((assignment, state))
            process.session = None
