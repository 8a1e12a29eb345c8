"""What is used is counted once: whoever says it again, and whoever starts again."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from opentinker_kit.clock import ManualClock
from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.application.changes import add_job, save_job
from opentinker_scheduler.application.usage import TokenCount, Usage
from opentinker_scheduler.domain import jobs as rules
from opentinker_scheduler.domain.model import Job, JobKind, JobState, Role, ServerOptions, SlotSpec
from opentinker_scheduler.domain.shares import Used
from opentinker_scheduler.ports import Transaction

T = TypeVar("T")
NIGHT = datetime(2026, 1, 1, 23, 59, tzinfo=UTC)


class World:
    """A database, a clock, and usage over both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(NIGHT)
        self.made = 0

    async def open(self) -> None:
        self.database = SqlDatabase(self.path)
        await self.database.open(self.clock.now())
        self.usage = Usage(self.database, self.clock)

    async def restart(self) -> None:
        await self.database.close()
        await self.open()

    async def run(self, work: Callable[[Transaction], T]) -> T:
        return await self.database.run(work)

    async def job(self, project: str = "p") -> Job:
        self.made += 1
        spec = SlotSpec(Role.TRAINER, "m", options=ServerOptions(engine="noop"))
        now = self.clock.now()
        job = Job(f"j{self.made}", project, JobKind.LORA_RL, (spec,), JobState.QUEUED, now, now)
        job = replace(job, cost_slots=2.0, cost_gpus=0.5)
        return await self.run(lambda tx: add_job(tx, job, now))

    async def change(self, job_id: str, rule: Callable[[Job], Job]) -> None:
        def run(tx: Transaction) -> None:
            job = tx.jobs.find(job_id)
            assert job is not None
            save_job(tx, job, rule(job), self.clock.now())

        await self.run(run)

    async def days(self, project: str = "p") -> dict[str, Used]:
        return dict(await self.run(lambda tx: self.usage.days(tx, project, None, 100)))

    async def jobs(self, project: str = "p") -> dict[str, Used]:
        found = await self.run(lambda tx: self.usage.jobs(tx, project, None, 100))
        return {job: used for _, job, used in found}

    async def heard(self, server: str, *counts: TokenCount) -> None:
        self.usage.heard(server, counts)
        await self.usage.take_in()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "scheduler.db")
    await world.open()
    yield world
    await world.database.close()


async def test_tokens_are_counted_once(world: World) -> None:
    job, other = await world.job(), await world.job("q")
    await world.heard("s1", TokenCount(job.id, 10, 0), TokenCount(other.id, 1, 1))
    await world.heard("s1", TokenCount(job.id, 10, 0))
    await world.heard("s1", TokenCount(job.id, 25, 3))
    await world.heard("s2", TokenCount(job.id, 4, 0))
    await world.restart()
    await world.heard("s1", TokenCount(job.id, 25, 3))
    # A server that says less than before started its count anew under an old name: nothing is taken back.
    await world.heard("s1", TokenCount(job.id, 7, 3))
    used = Used(tokens_trained=29, tokens_sampled=3)
    assert await world.days() == {"2026-01-01": used}
    assert await world.jobs() == {job.id: used}
    assert await world.jobs("q") == {other.id: Used(tokens_trained=1, tokens_sampled=1)}


async def test_unknown_jobs_count_for_nobody(world: World) -> None:
    await world.heard("s1", TokenCount("none", 10, 0))
    assert await world.days() == {}


async def test_a_count_that_could_not_be_written_waits(world: World, monkeypatch: Any) -> None:
    job = await world.job()
    real = world.database.run

    async def broken(work: Any) -> Any:
        raise RuntimeError("no disk")

    monkeypatch.setattr(world.database, "run", broken)
    with pytest.raises(RuntimeError):
        await world.heard("s1", TokenCount(job.id, 5, 0))
    monkeypatch.setattr(world.database, "run", real)
    await world.usage.take_in()
    assert (await world.jobs())[job.id].tokens_trained == 5


async def test_slots_are_counted_by_day_while_they_are_held_and_after(world: World) -> None:
    job = await world.job()
    assert await world.jobs() == {}
    await world.change(job.id, rules.granted)
    await world.clock.advance(90.0)
    by_day = {"2026-01-02": Used(60.0, 15.0), "2026-01-01": Used(120.0, 30.0)}
    assert await world.days() == by_day
    assert await world.jobs() == {job.id: Used(180.0, 45.0)}
    await world.change(job.id, lambda job: rules.cancelled(job, "", world.clock.now()))
    await world.clock.advance(1000.0)
    assert await world.days() == by_day
    assert list(await world.days()) == ["2026-01-02", "2026-01-01"]
    assert await world.jobs() == {job.id: Used(180.0, 45.0)}


async def test_notes_about_servers_that_ended_are_deleted(world: World) -> None:
    job = await world.job()
    await world.heard("s1", TokenCount(job.id, 10, 0))
    assert await world.run(lambda tx: tx.usage.counted("s1", job.id)) == (10, 0)
    await world.run(world.usage.forget)
    assert await world.run(lambda tx: tx.usage.counted("s1", job.id)) == (0, 0)
    assert (await world.jobs())[job.id].tokens_trained == 10
