"""A project's share of the GPUs is that of all that the nodes have, not of those that servers have now."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.application.placing import Placing, Terms
from opentinker_scheduler.domain.jobs import CrashBudget
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import (
    Job,
    JobKind,
    JobState,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
)
from opentinker_scheduler.domain.nodes import Node
from opentinker_scheduler.domain.shares import Tenants
from opentinker_scheduler.ports import Transaction

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TORCH, NOOP = ServerOptions("torch"), ServerOptions("noop")
LIMITS = Limits(max_servers=2, engine_gpus={"torch": 1})


def job(name: str, project: str, state: JobState, slots: float, gpus: float) -> Job:
    spec = SlotSpec(Role.TRAINER, "another", options=NOOP)
    made = Job(name, project, JobKind.LORA_RL, (spec,), state, NOW, NOW)
    return replace(made, cost_slots=slots, cost_gpus=gpus)


def server(name: str, options: ServerOptions) -> Server:
    return Server(name, Role.TRAINER, "m", options, ServerState.REGISTERED, 8, "process", NOW)


@pytest.mark.parametrize(("nodes", "first"), [((Node("a", 4),), "a"), ((), "b")])
async def test_who_holds_a_quarter_of_the_gpus_goes_before_who_holds_half_of_the_slots(
    tmp_path: Path, nodes: tuple[Node, ...], first: str
) -> None:
    database = SqlDatabase(tmp_path / "scheduler.db")
    await database.open(NOW)
    placing = Placing(Terms(LIMITS, Tenants(), CrashBudget(), "process"))

    def tick(tx: Transaction) -> dict[str, int]:
        tx.servers.add(replace(server("s", TORCH), devices=("a/0",)))
        tx.servers.add(server("t", NOOP))
        tx.jobs.add(job("a1", "a", JobState.RUNNING, 1, 1))
        tx.jobs.add(job("b1", "b", JobState.RUNNING, 8, 0))
        for project in "ab":
            tx.jobs.add(job(project, project, JobState.QUEUED, 1, 0))
        placing.place(tx, ["a", "b"], nodes, NOW)
        return {one.id: one.queue_position for one in tx.jobs.live() if one.state is JobState.QUEUED}

    assert await database.run(tick) == {name: 1 if name == first else 2 for name in "ab"}
    await database.close()
