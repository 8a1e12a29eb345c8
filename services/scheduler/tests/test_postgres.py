"""What only PostgreSQL has: several schedulers of which one leads, and a connection that can break."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from opentinker_kit.errors import ServiceError
from opentinker_kit.testing import PostgresServer, start_postgres, wait_until
from opentinker_scheduler.adapters.sql import leader
from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.adapters.sql.engines import Postgres, open_engine
from opentinker_scheduler.domain.model import Job, JobKind, JobState, Role, SlotSpec
from opentinker_scheduler.domain.records import Checkpoint
from opentinker_scheduler.ports import Transaction
from opentinker_scheduler.replica_ports import LeadershipLost, Replica
from opentinker_scheduler.settings import SchedulerSettings
from opentinkerapi.runtime.reasons import Reason

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SHORT_S = 3.0
A, B = Replica("a", "a:7070"), Replica("b", "b:7070")

Open = Callable[..., Any]


def job(job_id: str) -> Job:
    slots = (SlotSpec(Role.TRAINER, "m"),)
    return Job(job_id, "default", JobKind.LORA_RL, slots, JobState.QUEUED, NOW, NOW)


def add(job_id: str) -> Callable[[Transaction], Job]:
    return lambda tx: tx.jobs.add(job(job_id))


def ids(tx: Transaction) -> list[str]:
    return [each.id for each in tx.jobs.live()]


@pytest.fixture
async def where(postgres_records: Any) -> Postgres:
    return replace(postgres_records.where, lease_s=SHORT_S)


@pytest.fixture
async def make(where: Postgres) -> AsyncIterator[Callable[[], SqlDatabase]]:
    """Makes schedulers' sides of one database."""
    made: list[SqlDatabase] = []

    def one() -> SqlDatabase:
        made.append(SqlDatabase(where))
        return made[-1]

    yield one
    for database in made:
        await database.close()


async def test_a_second_one_stands_by_and_says_who_leads(make: Callable[[], SqlDatabase]) -> None:
    first, second = make(), make()
    await first.open(NOW, A)
    waiting = asyncio.create_task(second.open(NOW, B))

    async def told() -> bool:
        with pytest.raises(ServiceError) as refused:
            await second.run(ids)
        assert refused.value.reason is Reason.SERVER_STARTING
        return refused.value.metadata == {"leader": "a:7070"}

    await wait_until(told, what="it knows who leads")
    for _ in range(6):
        await first.renew()
        await asyncio.sleep(SHORT_S / 4)
    assert first.leads
    assert not second.leads
    assert not waiting.done()
    await first.run(add("j1"))
    # Leaves in order: nobody waits for the end of a lease.
    await first.close()
    await asyncio.wait_for(waiting, SHORT_S)
    assert (second.epoch, second.cluster) == (first.epoch + 1, first.cluster)
    assert await second.run(ids) == ["j1"]


async def test_one_that_is_silent_is_replaced_and_writes_nothing_more(
    make: Callable[[], SqlDatabase],
) -> None:
    first, second = make(), make()
    await first.open(NOW, A)
    await first.run(add("j1"))
    await asyncio.wait_for(second.open(NOW, B), 20.0)
    assert not first.leads
    for attempt in (first.run(add("j2")), first.renew()):
        with pytest.raises(LeadershipLost) as lost:
            await attempt
        assert lost.value.reason is Reason.DRAINING
    # What it frees in the end is not another's.
    await first.close()
    assert await second.run(ids) == ["j1"]
    await second.renew()


async def test_one_that_was_killed_and_started_again_leads_at_once(make: Callable[[], SqlDatabase]) -> None:
    first, again, third = make(), make(), make()
    await first.open(NOW, A)
    await asyncio.wait_for(again.open(NOW, A), 1.5)
    assert again.epoch == first.epoch + 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(third.open(NOW, B), SHORT_S / 4)


async def test_a_lease_that_ran_out_is_renewed_where_nobody_wanted_it(
    make: Callable[[], SqlDatabase],
) -> None:
    only = make()
    await only.open(NOW, A)
    await asyncio.sleep(SHORT_S + 0.1)
    assert not only.leads
    await only.run(add("j1"))
    await only.renew()
    assert only.leads


async def test_one_that_stood_still_in_a_transaction_commits_nothing(make: Callable[[], SqlDatabase]) -> None:
    first, second = make(), make()
    await first.open(NOW, A)
    written, go_on = threading.Event(), threading.Event()

    def stand_still(tx: Transaction) -> None:
        tx.jobs.add(job("never"))
        written.set()
        go_on.wait(30.0)
        tx.jobs.add(job("never either"))

    stuck = asyncio.create_task(first.run(stand_still))
    await wait_until(written.is_set)
    await asyncio.wait_for(second.open(NOW, B), 20.0)
    await second.run(add("j1"))
    go_on.set()
    with pytest.raises(ServiceError):
        await stuck
    with pytest.raises(LeadershipLost):
        await first.run(ids)
    assert await second.run(ids) == ["j1"]
    assert [each.id for each in await second.run(lambda tx: tx.jobs.page(None, 9, ()))] == ["j1"]


async def test_what_was_written_before_another_led_is_not_committed_after(where: Postgres) -> None:
    """The end of a transaction compares the epoch under a lock, so that none begins to lead in between."""
    old, new = (open_engine(replace(where, lease_s=10.0)) for _ in range(2))
    with old.begin() as connection:
        mine = leader.claim(connection, A, NOW, 10.0).epoch

    def write_while_another_takes_over() -> None:
        with old.begin() as connection:
            leader.check(connection, mine)
            connection.execute(text("INSERT INTO garbage VALUES ('x', 1)"))
            with new.begin() as other:
                other.execute(text("UPDATE leader SET lease_until = 0"))
                assert leader.claim(other, B, NOW, 10.0).epoch == mine + 1
            leader.confirm(connection, mine)

    def take_over() -> None:
        with old.begin() as connection:
            connection.execute(text("SET LOCAL lock_timeout = 100"))
            connection.execute(text("UPDATE leader SET lease_until = 0"))

    with pytest.raises(LeadershipLost):
        write_while_another_takes_over()
    with new.begin() as connection:
        leader.confirm(connection, -1)  # wrote nothing: locks nothing, compares nothing
        connection.execute(text("INSERT INTO garbage VALUES ('y', 1)"))
        leader.confirm(connection, mine + 1)
        with pytest.raises(OperationalError, match="lock timeout"):
            take_over()
    with new.begin() as connection:
        assert connection.execute(text("SELECT prefix FROM garbage")).scalars().all() == ["y"]
    for engine in (old, new):
        engine.dispose()


async def test_many_start_at_once_on_an_empty_server_and_one_leads(postgres_server: PostgresServer) -> None:
    url, password = postgres_server.url(postgres_server.make_database()), postgres_server.password_file
    replicas = [SqlDatabase(Postgres(url, password, SHORT_S)) for _ in range(4)]
    opening = [
        asyncio.create_task(each.open(NOW, Replica(f"r{number}", "x")))
        for number, each in enumerate(replicas)
    ]
    done, _ = await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED, timeout=20.0)
    assert len(done) == 1
    assert sorted(each.epoch for each in replicas) == [0, 0, 0, 1]
    for task in opening:
        task.cancel()
    for each in replicas:
        await each.close()


async def test_the_database_goes_and_comes_back(tmp_path: Path) -> None:
    with start_postgres() as server:
        database = SqlDatabase(Postgres(server.url(), server.password_file))
        await database.open(NOW, A)
        await database.run(add("j1"))
        server.stop()
        for _ in range(2):
            with pytest.raises(ServiceError) as refused:
                await database.run(add("j2"))
            assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
            assert refused.value.retry_after_s is not None
        server.start()
        # The first use after that already works.
        await database.run(add("j3"))
        assert await database.run(ids) == ["j1", "j3"]
        await database.close()


async def test_one_that_starts_before_the_database_waits_for_it() -> None:
    with start_postgres() as server:
        server.stop()
        database = SqlDatabase(Postgres(server.url(), server.password_file, SHORT_S))
        opening = asyncio.create_task(database.open(NOW, A))
        await asyncio.sleep(0.5)
        assert not opening.done()
        server.start()
        await asyncio.wait_for(opening, 20.0)
        await database.close()


def _cut(server: PostgresServer, where: Postgres) -> None:
    """End the scheduler's connection."""
    name = where.url.rpartition("/")[2]
    with server.connect() as connection:
        query = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s"
        assert connection.execute(query, (name,)).fetchall()


async def test_a_connection_that_broke_between_transactions_is_made_anew_unseen(
    make: Callable[[], SqlDatabase], where: Postgres, postgres_server: PostgresServer
) -> None:
    database = make()
    await database.open(NOW, A)
    await database.run(add("j1"))
    _cut(postgres_server, where)
    await database.run(add("j2"))
    assert await database.run(ids) == ["j1", "j2"]


async def test_a_connection_that_breaks_before_the_commit_leaves_nothing(
    make: Callable[[], SqlDatabase], where: Postgres, postgres_server: PostgresServer
) -> None:
    database = make()
    await database.open(NOW, A)

    def broken(tx: Transaction) -> None:
        tx.jobs.add(job("j1"))
        _cut(postgres_server, where)

    with pytest.raises(ServiceError) as refused:
        await database.run(broken)
    assert refused.value.reason is Reason.STORAGE_UNAVAILABLE
    assert await database.run(ids) == []


async def test_a_connection_that_breaks_after_the_commit_loses_nothing(
    make: Callable[[], SqlDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make()
    await database.open(NOW, A)
    transact: Any = database._transact

    def commit_and_break(*arguments: Any) -> None:
        transact(*arguments)
        raise OperationalError("COMMIT", {}, Exception("the connection is lost"))

    monkeypatch.setattr(database, "_transact", commit_and_break)
    with pytest.raises(ServiceError):
        await database.run(add("j1"))
    monkeypatch.setattr(database, "_transact", transact)
    assert await database.run(ids) == ["j1"]


async def test_texts_hold_what_processes_print(make: Callable[[], SqlDatabase]) -> None:
    database = make()
    await database.open(NOW, A)
    odd = replace(job("j1"), display_name="käse\0", state_reason="\0" * 3, labels={"a": "b\0"})
    await database.run(lambda tx: tx.jobs.add(odd))
    (stored,) = await database.run(lambda tx: tx.jobs.page(None, 1, ()))
    assert stored.labels == {"a": "b\0"}


async def test_texts_are_ordered_by_their_bytes(make: Callable[[], SqlDatabase]) -> None:
    database = make()
    await database.open(NOW, A)
    names = ["c-10", "c1", "c-9", "C2"]
    for name in names:
        one = Checkpoint(name, "p", "s", "k", 1, 1, 1, "", NOW)
        await database.run(lambda tx, one=one: tx.catalog.add_checkpoint(one))
    older = await database.run(lambda tx: tx.catalog.older_checkpoints("p", 0, 9))
    assert [each.id for each in older] == sorted(names, reverse=True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"database_url": "mysql://x/y"}, "must begin with"),
        ({"database_url": "postgresql://u:secret@h/d"}, "database_password_file"),
        ({"database_url": "postgresql://u@h/d?password=secret"}, "database_password_file"),
        ({"database_url": "postgresql://u@h/d", "database_file": "x.db"}, "two databases"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        SchedulerSettings(**settings)
    assert "secret" not in str(refused.value)


def test_settings_name_a_database(tmp_path: Path) -> None:
    assert SchedulerSettings(state_dir=tmp_path).database() == tmp_path / "scheduler.db"
    assert SchedulerSettings(database_url="sqlite:////x/y.db").database() == Path("/x/y.db")
    named = SchedulerSettings(database_url="postgresql://u@h/d", leader_lease_s=5).database()
    assert named == Postgres("postgresql://u@h/d", None, 5.0)
