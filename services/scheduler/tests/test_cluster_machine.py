"""A whole scheduler core, whatever happens around it, in any order.

Clients submit, end, pause, repeat themselves and vanish; servers start or cannot, answer, repeat themselves,
hang and die; transactions are lost or kept unheard; the bus is down; the scheduler starts again. No slot has
two owners, no acknowledged job is lost or stuck, nothing said late frees another's slot, no token of an
attempt that is over comes back. At the end all goes well, and nothing is left behind.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from services.scheduler.tests.cluster_world import SERVERS, Core, Fault, FaultyBus, Machines, Process

from opentinker_kit.auth import Kind, Principal, set_principal
from opentinker_kit.clock import ManualClock
from opentinker_kit.errors import ServiceError
from opentinker_scheduler.adapters.sql.engines import Location, Postgres
from opentinker_scheduler.domain.model import Assignment, AssignmentState, Job, JobState, Role
from opentinkerapi.scheduler.v1 import job_pb2
from opentinkerapi.scheduler.v1 import scheduler_service_pb2 as pb

T = TypeVar("T")
STEP_S = 2.0
FINAL = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class ClusterMachine(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ot-cluster-"))
        self.where = self.place()
        self.runner = asyncio.Runner()
        self.clock = ManualClock()
        self.machines, self.bus = Machines(), FaultyBus()
        self.asked: list[tuple[str, Any]] = []
        """Every request that changes something: method, request."""
        self.acknowledged: dict[str, str] = {}
        """Name of the job by request id, of CreateJobs that were answered."""
        self.clients: set[str] = set()
        """Jobs whose clients are there."""
        self.ended: dict[str, JobState] = {}
        self.over: dict[str, int] = {}
        """By job, the newest attempt under which a trainer slot was given up."""
        self.seen: dict[str, Assignment] = {}
        self._start()

    def place(self) -> Location:
        """Where its records are."""
        return self.folder / "scheduler.db"

    def _start(self) -> None:
        self.core = Core(self.where, self.clock, self.machines, self.bus)
        self.run(self.core.database.real.open(self.clock.now()))
        self.run(self.core.reconciler.adopt())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def and_what_it_began() -> T:
            set_principal(Principal(Kind.CALLER))
            try:
                return await work
            finally:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                if others:
                    await asyncio.wait(others)

        return self.runner.run(and_what_it_began())

    def read(self, work: Callable[[Any], T]) -> T:
        return self.runner.run(self.core.database.real.run(work))

    # --- clients ------------------------------------------------------------------------------------------

    @rule(
        roles=st.sampled_from([(1, 0), (2, 0), (1, 1), (1, 2), (0, 2)]),
        exclusive=st.booleans(),
        model=st.sampled_from("mn"),
        priority=st.integers(-1, 0),
        loss=st.sampled_from([job_pb2.ON_CLIENT_LOSS_PAUSE, job_pb2.ON_CLIENT_LOSS_CANCEL]),
    )
    def submit(self, roles: tuple[int, int], exclusive: bool, model: str, priority: int, loss: int) -> None:
        slots = [
            job_pb2.SlotSpec(
                role=role,
                base_model=model,
                tuning=job_pb2.TUNING_KIND_LORA if role == job_pb2.SLOT_ROLE_TRAINER else 0,  # type: ignore[arg-type]
                count=count,
                options=job_pb2.ServerOptions(engine="noop", exclusive=exclusive),
            )
            for role, count in zip(
                (job_pb2.SLOT_ROLE_TRAINER, job_pb2.SLOT_ROLE_INFERENCE), roles, strict=True
            )
            if count
        ]
        kind = job_pb2.JOB_KIND_LORA_RL if roles[0] else job_pb2.JOB_KIND_INFERENCE
        name = f"r{len(self.asked)}"
        spec = job_pb2.Job(
            kind=kind,
            slots=slots,
            priority=priority,
            labels={"request": name},
            on_client_loss=loss,  # type: ignore[arg-type]
        )
        spec.lease_ttl.FromSeconds(60)
        self._ask("CreateJob", pb.CreateJobRequest(request_id=name, job=spec))

    @precondition(lambda self: self.acknowledged)
    @rule(data=st.data(), what=st.sampled_from(["Cancel", "Pause", "Resume", "Finish"]))
    def decide(self, data: st.DataObject, what: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.acknowledged.values())))
        more = {"outcome": job_pb2.JOB_STATE_SUCCEEDED} if what == "Finish" else {}
        request_type = getattr(pb, f"{what}JobRequest")
        self._ask(f"{what}Job", request_type(name=job, request_id=f"r{len(self.asked)}", **more))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """A request comes once more: its first answer was lost, or somebody replays it."""
        method, request = data.draw(st.sampled_from(self.asked))
        self._ask(method, request, again=True)

    def _ask(self, method: str, request: Any, *, again: bool = False) -> None:
        if not again:
            self.asked.append((method, request))
        try:
            answer = self.run(getattr(self.core.api, method)(request, None))
        except (Fault, ServiceError):
            return
        if method == "CreateJob":
            name = self.acknowledged.setdefault(request.request_id, answer.job.name)
            assert answer.job.name == name
            self.clients.add(name)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def a_client_vanishes(self, data: st.DataObject) -> None:
        self.clients.discard(data.draw(st.sampled_from(sorted(self.clients))))

    # --- servers ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.machines.alive)
    @rule()
    def servers_work(self) -> None:
        for process in self.machines.alive:
            self._works(process)

    @precondition(lambda self: self.machines.alive)
    @rule(data=st.data())
    def a_server_works(self, data: st.DataObject) -> None:
        self._works(self._draw(data))

    def _works(self, process: Process) -> None:
        if process.silent:
            return
        for step in (self.core.connect, self.core.renew):
            self._try(step(process))
        while process.unsaid and process.session is not None:
            self._try(self.core.report(process, 0))
        if process.drains:
            self._dies(process, noticed=True)

    @precondition(lambda self: any(one.unsaid and one.session for one in self.machines.alive))
    @rule(data=st.data())
    def a_server_reports_one_thing(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([p for p in self.machines.alive if p.unsaid and p.session]))
        if not process.silent:
            number = data.draw(st.integers(0, len(process.unsaid) - 1))
            self._try(self.core.report(process, number))

    @precondition(lambda self: any(one.said for one in self.machines.processes.values()))
    @rule(data=st.data())
    def somebody_repeats_what_was_said(self, data: st.DataObject) -> None:
        """A report comes late, twice, or from a server that it is not about."""
        said = [each for one in self.machines.processes.values() for each in one.said]
        assignment, state = data.draw(st.sampled_from(said))
        process = self._draw(data) if self.machines.alive else None
        if process is None or process.session is None or process.silent:
            return
        if state is AssignmentState.READY and assignment in process.holds:
            return
        self._try(self.core.registry.reported(process.session, assignment, state, "again"))

    @precondition(lambda self: self.machines.alive)
    @rule(data=st.data(), noticed=st.booleans())
    def a_server_dies(self, data: st.DataObject, noticed: bool) -> None:
        self._dies(self._draw(data), noticed=noticed)

    @precondition(lambda self: self.machines.alive)
    @rule(data=st.data())
    def a_server_hangs(self, data: st.DataObject) -> None:
        self._draw(data).silent = True

    @rule()
    def the_next_start_is_impossible(self) -> None:
        self.machines.refuses = True

    def _dies(self, process: Process, *, noticed: bool) -> None:
        process.alive = False
        if noticed:
            self.machines.on_exit(process.server.id, -9)

    def _draw(self, data: st.DataObject) -> Process:
        found: Process = data.draw(st.sampled_from(self.machines.alive))
        return found

    # --- the scheduler, and what it stands on -------------------------------------------------------------

    @rule()
    def tick(self) -> None:
        self._try(self.core.reconciler.tick())

    @rule(fault=st.sampled_from(["lost", "unanswered"]))
    def the_next_transaction_fails(self, fault: str) -> None:
        self.core.database.next = fault

    @rule(down=st.booleans())
    def relay(self, down: bool) -> None:
        self.bus.down = down
        self._try(self.core.relay.relay_once())

    @rule()
    def starts_again(self) -> None:
        """kill -9: what was in memory is gone, sessions break."""
        for process in self.machines.processes.values():
            process.session = None
        self.machines.close()
        self.runner.run(self.core.database.real.close())
        self._start()

    @rule(seconds=st.sampled_from([2.0, 10.0, 40.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.runner.run(self.clock.advance(STEP_S))
            for process in self.machines.alive:
                if not process.silent:
                    self._try(self.core.renew(process))
            for job in sorted(self.clients):
                self._renew(job)
            self.tick()

    def _renew(self, job: str) -> None:
        self._try(self.core.api.RenewJobLease(pb.RenewJobLeaseRequest(name=job), None))

    def _try(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> None:
        with contextlib.suppress(Fault, ServiceError):
            self.run(work)  # type: ignore[arg-type]

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def a_slot_has_one_owner(self) -> None:
        servers = {server.id: server for server in self.read(lambda tx: tx.servers.live())}
        active = self.read(lambda tx: tx.assignments.active())
        owned = Counter((one.server_id, one.slot_no) for one in active)
        assert all(number == 1 for number in owned.values())
        assert all(slot < servers[server].slots_total for server, slot in owned)
        assert len(servers) <= SERVERS
        for process in self.machines.alive:
            if process.server.id in servers:
                slots = [one.slot_no for one in process.holds.values()]
                assert len(slots) == len(set(slots)), "a server was given a slot that it had not freed"

    @invariant()
    def no_job_is_lost(self) -> None:
        jobs: dict[str, Job] = {
            job.name: job for job in self.read(lambda tx: tx.jobs.page(None, 1000, (), None))
        }
        assert set(self.acknowledged.values()) <= set(jobs)
        by_request = Counter(job.labels["request"] for job in jobs.values())
        assert all(number == 1 for number in by_request.values()), "a request made two jobs"
        for name, state in self.ended.items():
            assert jobs[name].state is state, "a job came back"
        self.ended.update({name: job.state for name, job in jobs.items() if job.state in FINAL})

    @invariant()
    def attempts_only_grow(self) -> None:
        active = {one.id: one for one in self.read(lambda tx: tx.assignments.active())}
        for one in active.values():
            if one.id not in self.seen and one.role is Role.TRAINER:
                assert one.attempt > self.over.get(one.job_id, -1), "an attempt that is over came back"
        for one in self.seen.values():
            now = active.get(one.id)
            if one.role is Role.TRAINER and one.state.held and (now is None or not now.state.held):
                self.over[one.job_id] = max(one.attempt, self.over.get(one.job_id, -1))
        self.seen = active

    # --- the end ------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self._everything_ends()
        finally:
            self.machines.close()
            self.runner.run(self.core.database.real.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def _everything_ends(self) -> None:
        """From here on nothing fails: every job that was acknowledged runs and ends, and nothing stays."""
        self.core.database.next, self.machines.refuses, self.bus.down = "", False, False
        for process in self.machines.alive:
            process.silent = False
        names = sorted(self.acknowledged.values())
        states: dict[str, Job] = {}
        for round_number in range(200):
            for name in names:
                self._renew(name)
            self.tick()
            self.servers_work()
            self.tick()
            self.time_passes(STEP_S)
            self.a_slot_has_one_owner()
            states = {job.name: job for job in self.read(lambda tx: tx.jobs.page(None, 1000, (), None))}
            for name in names:
                job = states[name]
                if job.state is JobState.RUNNING:
                    request = pb.FinishJobRequest(
                        name=name,
                        request_id=f"end-{round_number}-{name}",
                        outcome=job_pb2.JOB_STATE_SUCCEEDED,
                    )
                    self._ask("FinishJob", request)
                elif job.state is JobState.PAUSED:
                    request = pb.ResumeJobRequest(name=name, request_id=f"again-{round_number}-{name}")
                    self._ask("ResumeJob", request)
            if all(states[name].state in FINAL for name in names):
                break
        stuck = [(job.state, job.state_reason) for job in states.values() if job.state not in FINAL]
        unheard = [job for job in states.values() if job.name not in names and job.state not in FINAL]
        assert len(stuck) == len(unheard), f"never ended: {stuck}"
        # What was never acknowledged has no client: its lease ends it. Idle servers end after that.
        self.clients.clear()
        for _ in range(10):
            self.servers_work()
            self.time_passes(40.0)
        assert not self.machines.alive, "servers outlived all work"
        assert not self.read(lambda tx: tx.assignments.active())
        while self.run(self.core.relay.relay_once()):
            pass
        told = {e.job_changed.job: e.job_changed.state for e in self.bus.events if e.HasField("job_changed")}
        for name in names:
            assert told[name] == states[name].state


TestClusterMachine = ClusterMachine.TestCase
TestClusterMachine.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)


class LongClusterMachine(ClusterMachine):
    """More of it, which takes minutes."""


class ClusterMachineOnPostgres(ClusterMachine):
    """The same on PostgreSQL."""

    make: ClassVar[Callable[[], Postgres]]

    def place(self) -> Location:
        return type(self).make()


@pytest.fixture(scope="class")
def machine_on_postgres(new_postgres: Callable[[], Postgres]) -> None:
    ClusterMachineOnPostgres.make = new_postgres


TestClusterMachineOnPostgres = pytest.mark.slow(
    pytest.mark.timeout(600)(
        pytest.mark.usefixtures("machine_on_postgres")(ClusterMachineOnPostgres.TestCase)
    )
)
TestClusterMachineOnPostgres.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)
TestLongClusterMachine = pytest.mark.slow(pytest.mark.timeout(1200)(LongClusterMachine.TestCase))
TestLongClusterMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
