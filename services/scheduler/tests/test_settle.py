"""Ticks on real databases, whatever happens between them: no slot has two owners, no job is lost or stuck.

Jobs come, end, pause and give way; servers start, answer, die; clients vanish; a tick fails half way; the
scheduler starts again. At the end everything answers, and every job that was not paused must end.
"""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import select

from opentinker_scheduler.adapters.sql.capacity import Live
from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.adapters.sql.engines import Location, Postgres, open_engine
from opentinker_scheduler.adapters.sql.tables import device_owners
from opentinker_scheduler.application.changes import add_job, end_assignment, save_job
from opentinker_scheduler.application.placing import Placing, Terms
from opentinker_scheduler.application.settle import Ending, Observed, settle
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Job,
    JobKind,
    JobState,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
)
from opentinker_scheduler.domain.names import new_id
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.shares import Rules, Tenants
from opentinker_scheduler.ports import Transaction

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)
SLOTS, SERVERS = 2, 4
NODES = (Node("a", 2), Node("b", 1))
TERMS = Terms(
    limits=Limits(
        max_servers=SERVERS,
        trainer_slots=SLOTS,
        inference_slots=SLOTS,
        reserve_after_s=5.0,
        engine_gpus={"noop": 1},
    ),
    tenants=Tenants(by_project={"heavy": Rules(weight=3.0), "tight": Rules(max_slots=4)}),
    budget=rules.CrashBudget(limit=1000),
    launcher_name="process",
    preemption=True,
    preempt_after_s=2.0,
)
NOOP = ServerOptions(engine="noop")


class Boom(Exception):
    """The injected fault."""


class Ticks(RuleBasedStateMachine):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ot-settle-"))
        self.where = self.place()
        self.runner = asyncio.Runner()
        self.now = START
        self._open()

    def place(self) -> Location:
        """An empty database."""
        return self.folder / "scheduler.db"

    def _open(self) -> None:
        self.database = SqlDatabase(self.where)
        self.placing = Placing(TERMS)
        self.runner.run(self.database.open(self.now))

    def run(self, work: Callable[[Transaction], T]) -> T:
        return self.runner.run(self.database.run(work))

    def jobs(self, *states: JobState) -> Sequence[Job]:
        return [job for job in self.run(lambda tx: tx.jobs.live()) if not states or job.state in states]

    def servers(self) -> Sequence[Server]:
        return self.run(lambda tx: tx.servers.live())

    def assignments(self, *states: AssignmentState) -> Sequence[Assignment]:
        found = self.run(lambda tx: tx.assignments.active())
        return sorted((one for one in found if not states or one.state in states), key=lambda one: one.id)

    def settle(
        self, tx: Transaction, endings: Sequence[Ending] = (), lost_clients: Sequence[str] = ()
    ) -> None:
        attended = [job.id for job in tx.jobs.live()]
        seen = Observed(endings, lost_clients, (), (), attended, {}, NODES)
        settle(tx, seen, self.placing, self.now)

    @rule(
        count=st.integers(1, 5),
        model=st.sampled_from("mn"),
        project=st.sampled_from(["default", "heavy", "tight"]),
        priority=st.integers(0, 1),
        limit_s=st.sampled_from([0.0, 4.0, 30.0]),
        kind=st.sampled_from(["trainer", "both", "alone"]),
    )
    def submit(self, count: int, model: str, project: str, priority: int, limit_s: float, kind: str) -> None:
        if project == "tight":
            count = min(count, 2)
        trains = SlotSpec(Role.TRAINER, model, count=count, options=NOOP, exclusive=kind == "alone")
        serves = SlotSpec(Role.INFERENCE, model, options=NOOP)
        slots = (replace(trains, count=min(count, 2)), serves) if kind == "both" else (trains,)
        cost = float(sum(spec.count for spec in slots))
        job = Job(new_id(), project, JobKind.LORA_RL, slots, JobState.QUEUED, self.now, self.now)
        job = replace(job, priority=priority, max_duration_s=limit_s, cost_slots=cost)
        self.run(lambda tx: add_job(tx, job, self.now))

    @rule()
    def tick(self) -> None:
        self.run(self.settle)

    @rule()
    def a_tick_fails_half_way(self) -> None:
        def fail(tx: Transaction) -> None:
            self.settle(tx)
            raise Boom

        before = self._all()
        with pytest.raises(Boom):
            self.run(fail)
        assert self._all() == before

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    @rule()
    def starts_again(self) -> None:
        self.runner.run(self.database.close())
        self._open()

    @rule()
    def servers_answer(self) -> None:
        """Those that were started register and are ready."""

        def run(tx: Transaction) -> None:
            for server in tx.servers.live():
                if server.state is ServerState.LAUNCHING:
                    ready = replace(server, state=ServerState.READY, register_time=self.now, attempt=1)
                    tx.servers.save(ready)

        self.run(run)

    @precondition(lambda self: self.assignments(AssignmentState.GRANTED, AssignmentState.RELEASING))
    @rule(data=st.data())
    def a_server_reports(self, data: st.DataObject) -> None:
        """A slot that was given is ready, or one that was taken back is free."""
        waiting = self.assignments(AssignmentState.GRANTED, AssignmentState.RELEASING)
        self._report(data.draw(st.sampled_from(waiting)))

    def _report(self, assignment: Assignment) -> None:
        if assignment.state is AssignmentState.RELEASING:
            self.run(lambda tx: end_assignment(tx, assignment, "released", self.now))
        else:
            ready = replace(assignment, state=AssignmentState.READY, change_time=self.now)
            self.run(lambda tx: tx.assignments.save(ready))

    @precondition(lambda self: self.servers())
    @rule(data=st.data())
    def a_server_dies(self, data: st.DataObject) -> None:
        server = data.draw(st.sampled_from(self.servers()))
        self.run(lambda tx: self.settle(tx, [Ending(server.id, "died")]))

    @precondition(lambda self: self.jobs())
    @rule(data=st.data())
    def a_client_is_gone(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs()))
        self.run(lambda tx: self.settle(tx, lost_clients=[job.id]))

    @precondition(lambda self: self.jobs())
    @rule(data=st.data(), what=st.sampled_from(["cancel", "pause", "resume", "finish"]))
    def a_client_decides(self, data: st.DataObject, what: str) -> None:
        job = data.draw(st.sampled_from(self.jobs()))
        steps: dict[str, tuple[JobState, Callable[[], Job]]] = {
            "cancel": (JobState.CANCELLED, lambda: rules.cancelled(job, "", self.now)),
            "pause": (JobState.PAUSED, lambda: rules.paused(job, "")),
            "resume": (JobState.QUEUED, lambda: rules.resumed(job, self.now)),
            "finish": (JobState.SUCCEEDED, lambda: rules.finished(job, JobState.SUCCEEDED, "", self.now)),
        }
        state, change = steps[what]
        allowed = state in rules.SUCCESSORS[job.state] and (what != "resume" or job.state is JobState.PAUSED)
        if allowed:
            self.run(lambda tx: save_job(tx, job, change(), self.now))

    @invariant()
    def a_slot_has_one_owner(self) -> None:
        servers = {server.id: server for server in self.servers()}
        owned = Counter((one.server_id, one.slot_no) for one in self.assignments())
        assert all(number == 1 for number in owned.values())
        assert all(0 <= slot < servers[server].slots_total for server, slot in owned)
        assert len(servers) <= SERVERS
        alone = {one.server_id for one in self.assignments() if one.exclusive}
        for server in alone:
            assert len({one.job_id for one in self.assignments() if one.server_id == server}) == 1

    @invariant()
    def a_gpu_has_one_owner(self) -> None:
        there = [device for node in NODES for device in node.devices]
        given = [device for server in self.servers() for device in server.devices]
        assert len(given) == len(set(given)) == len(self.servers())
        assert set(given) <= set(there)

    @invariant()
    def who_holds_slots_may(self) -> None:
        jobs = {job.id: job for job in self.jobs()}
        held = self.assignments(AssignmentState.GRANTED, AssignmentState.READY)
        for one in held:
            job = jobs[one.job_id]
            assert job.state.placed
            assert one.attempt <= job.attempt
        places = Counter((one.job_id, one.slot_index, one.ordinal) for one in held)
        assert all(number == 1 for number in places.values())
        for job in jobs.values():
            assert (job.grant_time is not None) == job.state.placed
            if job.state is JobState.RUNNING:
                have = sum(one.job_id == job.id for one in held)
                assert have == sum(spec.count for spec in job.slots)
        tight = [job for job in jobs.values() if job.project == "tight" and job.state.placed]
        assert sum(job.cost_slots for job in tight) <= 4

    @invariant()
    def memory_is_what_the_tables_say(self) -> None:
        stored = Live()
        engine = open_engine(self.where)
        with engine.begin() as connection:
            stored.load(connection)
            owners = connection.execute(select(device_owners.c.device, device_owners.c.server_id)).all()
        engine.dispose()
        assert sorted(map(tuple, owners)) == sorted(
            (d, one.id) for one in self.servers() for d in one.devices
        )
        rows = (stored.jobs.all(), stored.servers.all(), stored.assignments.all())
        assert self._all() == [_by_id(kind) for kind in rows]

    def _all(self) -> list[dict[str, Any]]:
        def read(tx: Transaction) -> tuple[Sequence[Any], ...]:
            return tx.jobs.live(), tx.servers.live(), tx.assignments.active()

        return [_by_id(kind) for kind in self.run(read)]

    def teardown(self) -> None:
        try:
            self._everything_ends()
        finally:
            self.runner.run(self.database.close())
            self.runner.close()
            shutil.rmtree(self.folder)

    def _everything_ends(self) -> None:
        """From here on all goes well: whoever was not paused gets its slots, runs, and ends."""
        left: Sequence[Job] = ()
        for _ in range(200):
            self.tick()
            self.servers_answer()
            for server in self.servers():
                if server.state is ServerState.DRAINING:
                    self.run(lambda tx, name=server.id: self.settle(tx, [Ending(name, "stopped")]))
            for assignment in self.assignments(AssignmentState.GRANTED, AssignmentState.RELEASING):
                self._report(assignment)
            self.now += timedelta(seconds=1)
            self.tick()
            for job in self.jobs(JobState.RUNNING):
                done = rules.finished(job, JobState.SUCCEEDED, "", self.now)
                self.run(lambda tx, job=job, done=done: save_job(tx, job, done, self.now))
            self.a_slot_has_one_owner()
            left = [job for job in self.jobs() if job.state is not JobState.PAUSED]
            if not left:
                return
        raise AssertionError(f"never ended: {[(job.state, job.state_reason) for job in left]}")


def _by_id(rows: Sequence[Any]) -> dict[str, Any]:
    """Rows as they are stored: what waiting jobs are told is not."""
    untold = {"queue_position": 0, "estimated_start_time": None, "state_reason": "", "revision": 0}
    return {row.id: replace(row, **untold) if isinstance(row, Job) else row for row in rows}


TestTicks = Ticks.TestCase
TestTicks.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


class TicksOnPostgres(Ticks):
    """The same on PostgreSQL."""

    make: ClassVar[Callable[[], Postgres]]

    def place(self) -> Location:
        return type(self).make()


@pytest.fixture(scope="class")
def ticks_on_postgres(new_postgres: Callable[[], Postgres]) -> None:
    TicksOnPostgres.make = new_postgres


TestTicksOnPostgres = pytest.mark.slow(pytest.mark.usefixtures("ticks_on_postgres")(TicksOnPostgres.TestCase))
TestTicksOnPostgres.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
