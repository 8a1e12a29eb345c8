"""The SQL adapter on both databases: what is written comes back, once, and nothing is lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import alembic.autogenerate
import alembic.config
import pytest
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from opentinker_kit.errors import ServiceError
from opentinker_scheduler.adapters.sql.database import HEAD, MIGRATIONS, Committed, SqlDatabase
from opentinker_scheduler.adapters.sql.engines import open_engine
from opentinker_scheduler.adapters.sql.tables import metadata
from opentinker_scheduler.domain.model import (
    Assignment,
    AssignmentState,
    Failure,
    Job,
    JobKind,
    JobState,
    OnClientLoss,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.domain.records import Blob, Fact, LoopState, MetricsRow, Policy, Version
from opentinker_scheduler.domain.shares import Used
from opentinker_scheduler.ports import DeviceTaken, SlotTaken, StoredAnswer, Transaction
from opentinker_scheduler.replica_ports import LeadershipLost, Replica
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
OPTIONS = ServerOptions("vllm", "bfloat16", "merged", 64, 4096)


ME = Replica("me", "me:1")
"""A scheduler that is started again, and leads again at once."""


@pytest.fixture
async def database(records: Any) -> AsyncIterator[SqlDatabase]:
    opened = SqlDatabase(records.where)
    await opened.open(NOW, ME)
    yield opened
    await opened.close()


def job(job_id: str = "j1", state: JobState = JobState.QUEUED, at: datetime = NOW) -> Job:
    return Job(
        id=job_id,
        project="default",
        kind=JobKind.LORA_RL,
        slots=(SlotSpec(Role.TRAINER, "m", Tuning.LORA, 3, OPTIONS, True), SlotSpec(Role.INFERENCE, "n")),
        state=state,
        create_time=at,
        queue_time=at,
        display_name="käse",
        error=Failure("LAUNCH_FAILED", "boom\nbang", {"log": "x"}),
        on_client_loss=OnClientLoss.CANCEL,
        lease_ttl_s=12.5,
        labels={"a": "b"},
        run="runs/r",
        crashes=(at, at + timedelta(seconds=1)),
        start_time=at,
        cost_slots=3.5,
        cost_gpus=0.25,
        priority=-7,
        max_duration_s=60.5,
        idle_limit_s=30.0,
        held_s=1.25,
        grant_time=at,
        progress_time=at + timedelta(seconds=2),
    )


def server(server_id: str = "s1", state: ServerState = ServerState.READY) -> Server:
    return Server(
        server_id, Role.INFERENCE, "m", OPTIONS, state, 8, "process", NOW, instance_id=f"i-{server_id}"
    )


def assignment(
    name: str, job_id: str, slot: int, state: AssignmentState = AssignmentState.READY
) -> Assignment:
    return Assignment(name, job_id, "s1", slot, 0, slot, Role.INFERENCE, 4, False, state, NOW, NOW)


async def test_the_migrations_make_the_tables(database: SqlDatabase, records: Any) -> None:
    engine = open_engine(records.where)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert alembic.autogenerate.compare_metadata(context, metadata) == []
        assert context.get_current_revision() == HEAD
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD
    engine.dispose()


async def test_jobs_come_back_as_they_were(database: SqlDatabase) -> None:
    added = await database.run(lambda tx: tx.jobs.add(job()))
    assert (added.seq, added.revision) == (1, 1)
    assert await database.run(lambda tx: tx.jobs.find("j1")) == added
    saved = await database.run(lambda tx: tx.jobs.save(replace(added, error=None, end_time=NOW)))
    assert saved.revision == 2
    assert await database.run(lambda tx: tx.jobs.find("j1")) == saved
    assert await database.run(lambda tx: tx.jobs.find("none")) is None
    with pytest.raises(KeyError):
        await database.run(lambda tx: tx.jobs.save(job("none")))


async def test_live_jobs_come_in_queue_order(database: SqlDatabase) -> None:
    def fill(tx: Transaction) -> None:
        tx.jobs.add(job("late", at=NOW + timedelta(seconds=9)))
        tx.jobs.add(job("done", JobState.SUCCEEDED))
        tx.jobs.add(job("early"))
        tx.jobs.add(job("also early"))

    await database.run(fill)
    live = await database.run(lambda tx: tx.jobs.live())
    assert [item.id for item in live] == ["early", "also early", "late"]
    page = await database.run(lambda tx: tx.jobs.page(None, 2, ()))
    assert [item.id for item in page] == ["also early", "early"]
    page = await database.run(lambda tx: tx.jobs.page(page[-1].seq, 9, (JobState.QUEUED,)))
    assert [item.id for item in page] == ["late"]


async def test_what_a_waiting_job_is_told_is_seen_everywhere(database: SqlDatabase) -> None:
    await database.run(lambda tx: tx.jobs.add(job()))
    await database.run(lambda tx: tx.jobs.tell("j1", 7, "waiting for Godot"))
    await database.run(lambda tx: tx.jobs.tell("nobody", 1, "x"))
    for read in (
        lambda tx: tx.jobs.find("j1"),
        lambda tx: tx.jobs.live()[0],
        lambda tx: tx.jobs.page(None, 1, (JobState.QUEUED,))[0],
    ):
        seen = await database.run(read)
        assert (seen.queue_position, seen.state_reason) == (7, "waiting for Godot")


async def test_what_has_not_ended_is_known_again_after_a_restart(database: SqlDatabase, records: Any) -> None:
    def fill(tx: Transaction) -> None:
        tx.jobs.add(job())
        tx.jobs.add(job("done", JobState.FAILED))
        tx.servers.add(server())
        tx.servers.add(server("gone", ServerState.LOST))
        tx.assignments.add(assignment("a1", "j1", 0))
        tx.assignments.add(assignment("a2", "j2", 1, AssignmentState.ENDED))

    await database.run(fill)
    read = lambda tx: (tx.jobs.live(), tx.servers.live(), tx.assignments.active())  # noqa: E731
    before = await database.run(read)
    assert [len(rows) for rows in before] == [1, 1, 1]
    again = SqlDatabase(records.where)
    await again.open(NOW, ME)
    assert await again.run(read) == before
    await again.close()


async def test_what_is_rolled_back_is_not_remembered(database: SqlDatabase) -> None:
    def fill(tx: Transaction) -> None:
        tx.jobs.add(job())
        tx.servers.add(server())
        tx.assignments.add(assignment("a1", "j1", 0))

    await database.run(fill)

    def fail(tx: Transaction) -> None:
        added, there = tx.jobs.find("j1"), tx.servers.find("s1")
        assert added is not None
        assert there is not None
        tx.jobs.save(replace(added, state=JobState.FAILED, project="other"))
        tx.jobs.tell("j1", 3, "never")
        tx.servers.save(replace(there, state=ServerState.LOST))
        tx.assignments.save(assignment("a1", "j1", 0, AssignmentState.ENDED))
        tx.assignments.add(assignment("a2", "j2", 0))
        assert (tx.jobs.live(), tx.servers.live(), tx.jobs.count("default")) == ([], [], 0)
        raise RuntimeError("no")

    before = await database.run(lambda tx: (tx.jobs.live(), tx.servers.live(), tx.assignments.active()))
    with pytest.raises(RuntimeError):
        await database.run(fail)
    after = await database.run(lambda tx: (tx.jobs.live(), tx.servers.live(), tx.assignments.active()))
    assert after == before
    assert await database.run(lambda tx: tx.jobs.count("default")) == 1
    assert [a.id for a in await database.run(lambda tx: tx.assignments.of_server("s1"))] == ["a1"]
    assert await database.run(lambda tx: tx.assignments.of_job("j2")) == []


async def test_usage_adds_up_by_project_and_day(database: SqlDatabase) -> None:
    for project, day in (("p", "2026-01-01"), ("p", "2026-01-01"), ("q", "2026-01-01"), ("p", "2026-01-02")):
        who = replace(job(f"j-{project}"), project=project)
        used = Used(2.0, 0.5, 3, 1)
        await database.run(lambda tx, at=(who, day), used=used: tx.usage.add(*at, used))
    found = await database.run(lambda tx: tx.usage.of_day("2026-01-01"))
    assert found == {"p": Used(4.0, 1.0, 6, 2), "q": Used(2.0, 0.5, 3, 1)}
    days = await database.run(lambda tx: tx.usage.page_days("p", None, 10))
    assert [day for day, _ in days] == ["2026-01-02", "2026-01-01"]
    assert await database.run(lambda tx: tx.usage.page_days("p", "2026-01-02", 10)) == days[1:]
    (row,) = await database.run(lambda tx: tx.usage.page_jobs("p", None, 10))
    assert row[1:] == ("j-p", Used(6.0, 1.5, 9, 3))
    assert await database.run(lambda tx, last=row[0]: tx.usage.page_jobs("p", last, 10)) == []


async def test_servers_come_back_as_they_were(database: SqlDatabase) -> None:
    added = await database.run(lambda tx: tx.servers.add(server()))
    assert await database.run(lambda tx: tx.servers.find("s1")) == added
    assert await database.run(lambda tx: tx.servers.find_instance("i-s1")) == added
    lost = replace(added, state=ServerState.LOST, exit_code=-9, pid=7, pid_start=1234.5, end_time=NOW)
    await database.run(lambda tx: tx.servers.save(lost))
    assert await database.run(lambda tx: tx.servers.find("s1")) == lost
    assert await database.run(lambda tx: tx.servers.live()) == []
    assert await database.run(lambda tx: tx.servers.page(None, 9, False)) == []
    assert await database.run(lambda tx: tx.servers.page(None, 9, True)) == [lost]


async def test_two_servers_can_never_have_one_gpu(database: SqlDatabase, records: Any) -> None:
    first = replace(server(), devices=("a/0", "a/1"))
    added = await database.run(lambda tx: tx.servers.add(first))
    assert added.devices == ("a/0", "a/1")
    second = replace(server("s2"), devices=("b/0", "a/1"))
    with pytest.raises(DeviceTaken):
        await database.run(lambda tx: tx.servers.add(second))
    assert await database.run(lambda tx: tx.servers.find("s2")) is None
    # Neither while the first is being stopped, nor by another scheduler; only once it has ended.
    await database.run(lambda tx: tx.servers.save(replace(added, state=ServerState.DRAINING)))
    again = SqlDatabase(records.where)
    await again.open(NOW, ME)
    assert [one.devices for one in await again.run(lambda tx: tx.servers.live())] == [added.devices]
    with pytest.raises(DeviceTaken):
        await again.run(lambda tx: tx.servers.add(second))
    ended = replace(added, state=ServerState.STOPPED)
    await again.run(lambda tx: tx.servers.save(ended))
    await again.run(lambda tx: tx.servers.add(second))
    # What it had stays known, and writing it once more takes nothing from the new owner.
    await again.run(lambda tx: tx.servers.save(replace(ended, exit_code=0)))
    assert (await again.run(lambda tx: tx.servers.page(None, 9, True)))[1].devices == ("a/0", "a/1")
    with pytest.raises(DeviceTaken):
        await again.run(lambda tx: tx.servers.add(replace(server("s3"), devices=("a/1",))))
    await again.close()


async def test_two_jobs_can_never_own_one_slot(database: SqlDatabase) -> None:
    await database.run(lambda tx: tx.assignments.add(assignment("a1", "j1", 0)))
    with pytest.raises(SlotTaken):
        await database.run(lambda tx: tx.assignments.add(assignment("a2", "j2", 0)))
    # Neither while it is being freed; only then.
    releasing = assignment("a1", "j1", 0, AssignmentState.RELEASING)
    await database.run(lambda tx: tx.assignments.save(releasing))
    with pytest.raises(SlotTaken):
        await database.run(lambda tx: tx.assignments.add(assignment("a2", "j2", 0)))
    await database.run(lambda tx: tx.assignments.save(replace(releasing, state=AssignmentState.ENDED)))
    await database.run(lambda tx: tx.assignments.add(assignment("a2", "j2", 0)))
    assert [a.id for a in await database.run(lambda tx: tx.assignments.of_server("s1"))] == ["a2"]
    assert await database.run(lambda tx: tx.assignments.of_job("j1")) == []


async def test_a_place_in_a_job_is_filled_once(database: SqlDatabase) -> None:
    await database.run(lambda tx: tx.assignments.add(assignment("a1", "j1", 0)))
    twice = replace(assignment("a2", "j1", 1), ordinal=0)
    with pytest.raises(SlotTaken):
        await database.run(lambda tx: tx.assignments.add(twice))


async def test_what_raises_is_undone_whole(database: SqlDatabase) -> None:
    def fail(tx: Transaction) -> None:
        tx.jobs.add(job())
        tx.assignments.add(assignment("a1", "j1", 0))
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await database.run(fail)
    assert await database.run(lambda tx: (tx.jobs.live(), tx.assignments.active())) == ([], [])


async def test_no_update_is_lost(database: SqlDatabase) -> None:
    """Read-then-write from many sides at once: every one of them counts."""
    added = await database.run(lambda tx: tx.jobs.add(job()))

    def bump(tx: Transaction) -> None:
        now = tx.jobs.find("j1")
        assert now is not None
        tx.jobs.save(replace(now, attempt=now.attempt + 1))

    await asyncio.gather(*(database.run(bump) for _ in range(200)))
    after = await database.run(lambda tx: tx.jobs.find("j1"))
    assert after is not None
    assert (after.attempt, after.revision) == (added.attempt + 200, added.revision + 200)


async def test_a_newer_leader_shuts_out_the_older(database: SqlDatabase, records: Any) -> None:
    await database.run(lambda tx: tx.jobs.add(job()))
    newer = SqlDatabase(records.where)
    await newer.open(NOW, ME)
    assert (newer.epoch, newer.cluster) == (database.epoch + 1, database.cluster)
    with pytest.raises(LeadershipLost):
        await database.run(lambda tx: tx.jobs.add(job("j2")))
    assert [item.id for item in await newer.run(lambda tx: tx.jobs.live())] == ["j1"]
    await newer.close()


async def test_before_it_is_open_callers_are_told_to_wait(records: Any) -> None:
    closed = SqlDatabase(records.where)
    with pytest.raises(ServiceError) as refused:
        await closed.run(lambda tx: tx.jobs.live())
    assert refused.value.reason is Reason.SERVER_STARTING
    await closed.close()


async def test_commits_say_what_changed(records: Any) -> None:
    heard: list[Committed] = []
    database = SqlDatabase(records.where, heard.append)
    await database.open(NOW)
    await database.run(lambda tx: tx.jobs.live())
    await database.run(lambda tx: tx.jobs.add(job()))
    await database.run(lambda tx: tx.jobs.tell("j1", 4, "waiting"))
    await database.run(lambda tx: tx.jobs.tell("j1", 4, "waiting"))
    await database.run(lambda tx: tx.outbox.add(Fact("checkpoint_saved", "x"), NOW))
    nobody: frozenset[str] = frozenset()
    assert heard == [
        Committed(frozenset({"j1"}), nobody, facts=False),
        Committed(nobody, frozenset({"j1"}), facts=False),
        Committed(nobody, nobody, facts=True),
    ]
    await database.close()


async def test_answers_are_found_and_forgotten(database: SqlDatabase) -> None:
    def fill(tx: Transaction) -> None:
        tx.requests.add("scope", "r1", StoredAnswer("d", b"\0answer"), NOW)
        tx.requests.add("scope", "r2", StoredAnswer("d", b""), NOW + timedelta(hours=2))

    await database.run(fill)
    assert await database.run(lambda tx: tx.requests.find("scope", "r1")) == StoredAnswer("d", b"\0answer")
    assert await database.run(lambda tx: tx.requests.find("other", "r1")) is None
    assert await database.run(lambda tx: tx.requests.forget_before(NOW + timedelta(hours=1))) == 1
    assert await database.run(lambda tx: tx.requests.find("scope", "r1")) is None


async def test_facts_come_out_as_events_in_order(database: SqlDatabase) -> None:
    facts = [
        Fact("job", "jobs/j", detail={"state": "queued", "attempt": 2}),
        Fact("weights_published", "policies/p", "id-1", {"version": 3, "sha256": "s", "manifest_key": "k"}),
        Fact("metrics_step", "runs/r", detail={"step": 4}, values={"reward": 0.5}),
    ]
    for fact in facts:
        await database.run(lambda tx, fact=fact: tx.outbox.add(fact, NOW))
    rows = await database.run(lambda tx: tx.outbox.pending(10))
    events = [row.event for row in rows]
    assert [event.WhichOneof("fact") for event in events] == [
        "job_changed",
        "weights_published",
        "metrics_step",
    ]
    assert events[1].id == "id-1"
    assert events[0].id != events[2].id
    assert events[0].occur_time.ToDatetime(UTC) == NOW
    assert dict(events[2].metrics_step.values) == {"reward": 0.5}
    await database.run(lambda tx: tx.outbox.delete([rows[0].row_id]))
    assert [row.event.id for row in await database.run(lambda tx: tx.outbox.pending(1))] == ["id-1"]


async def test_policies_and_versions(database: SqlDatabase) -> None:
    made = Policy("p", "default", "j", "m", "d", Tuning.LORA, 8, None, ("q", "v"), 2**64 - 1, "", 0, NOW)
    added = await database.run(lambda tx: tx.catalog.add_policy(made))
    assert await database.run(lambda tx: tx.catalog.find_policy("p")) == added
    for number in (0, 2, 1):
        item = Version("p", number, "s", "k", 5, NOW)
        await database.run(lambda tx, item=item: tx.catalog.add_version(item))
    found = await database.run(lambda tx: tx.catalog.find_policy("p"))
    assert found is not None
    assert found.latest_version == 2
    assert await database.run(lambda tx: tx.catalog.policy_names("j")) == ["policies/p"]
    await database.run(lambda tx: tx.catalog.delete_policy("p"))
    assert await database.run(lambda tx: tx.catalog.page_versions("p", None, 9)) == []


async def test_rows_of_a_run_replace_each_other(database: SqlDatabase) -> None:
    rows = [MetricsRow(1, {"a": 1.0}, NOW), MetricsRow(1, {"b": 2.0}, NOW)]
    await database.run(lambda tx: tx.runs.put_metrics("r", rows))
    assert await database.run(lambda tx: tx.runs.page_metrics("r", None, 9)) == rows[1:]
    for state in (LoopState(1, "c", b"x", None), LoopState(2, "c", b"", Blob("s", 3, "u"))):
        await database.run(lambda tx, state=state: tx.runs.put_loop_state("r", state))
        assert await database.run(lambda tx: tx.runs.find_loop_state("r")) == state


async def test_a_database_of_a_newer_program_is_refused(database: SqlDatabase, records: Any) -> None:
    engine = open_engine(records.where)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    newer = SqlDatabase(records.where)
    with pytest.raises(Exception, match="9999"):
        await newer.open(NOW, ME)
    await newer.close()


async def test_what_became_of_a_job_is_kept_with_the_change_it_tells_of(database: SqlDatabase) -> None:
    def change(tx: Transaction) -> None:
        first = tx.jobs.add(job("j1", JobState.QUEUED))
        tx.history.add(replace(first, error=None, state_reason="queued"), NOW)
        tx.history.add(replace(first, error=Failure("", "broke\nand more"), state=JobState.FAILED), NOW)
        # Also within the transaction.
        assert [event.state for event in tx.history.of_job("j1", 0)] == [JobState.QUEUED, JobState.FAILED]

    await database.run(change)
    first, second = await database.run(lambda tx: tx.history.of_job("j1", 0))
    assert (first.reason, second.reason, first.time) == ("queued", "broke", NOW)
    assert await database.run(lambda tx: tx.history.of_job("j1", first.seq)) == [second]
    assert await database.run(lambda tx: tx.history.of_job("j2", 0)) == []

    def fail(tx: Transaction) -> None:
        tx.history.add(job("j1"), NOW)
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        await database.run(fail)
    assert len(await database.run(lambda tx: tx.history.of_job("j1", 0))) == 2


async def test_servers_that_a_job_was_on_and_how_long_jobs_held_slots(database: SqlDatabase) -> None:
    def fill(tx: Transaction) -> None:
        for number, server in enumerate(("s2", "s1", "s2")):
            at = NOW + timedelta(seconds=number)
            ended = replace(assignment(f"a{number}", "j1", 0, AssignmentState.ENDED), server_id=server)
            tx.assignments.add(replace(ended, create_time=at))
        tx.assignments.add(assignment("b", "j2", 1))
        for number in range(3):
            tx.jobs.add(replace(job(f"e{number}", JobState.SUCCEEDED), held_s=float(number), end_time=NOW))
        tx.jobs.add(replace(job("running", JobState.RUNNING), held_s=9.0, end_time=None))

    await database.run(fill)
    assert await database.run(lambda tx: tx.assignments.servers_of("j1")) == ["s2", "s1"]
    assert await database.run(lambda tx: tx.assignments.servers_of("j2")) == ["s1"]
    assert [held for _, held in await database.run(lambda tx: tx.jobs.held(9))] == [2.0, 1.0]
    assert len(await database.run(lambda tx: tx.jobs.held(1))) == 1
