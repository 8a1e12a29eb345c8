"""How a scheduler's tick grows with its queue: 1,000 full servers, 1,000 to 10,000 jobs that wait.

Each tick is one transaction of the real scheduler on a real database (SQLite): seven jobs have ended since
the last one, as about 35 do in a second where 2,000 slots are held for a minute, and seven others get their
slots. Longer queues take their turns with shorter ones. What is claimed is that ten times the queue costs
less than ten times the tick; the curve is kept beside this record.
"""

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from opentinker_scheduler.adapters.sql.database import SqlDatabase
from opentinker_scheduler.application.placing import Placing, Terms
from opentinker_scheduler.application.settle import Observed, settle
from opentinker_scheduler.domain.jobs import CrashBudget
from opentinker_scheduler.domain.limits import Limits
from opentinker_scheduler.domain.model import (
    AssignmentState,
    Job,
    JobKind,
    JobState,
    Role,
    Server,
    ServerOptions,
    ServerState,
    SlotSpec,
    Tuning,
)
from opentinker_scheduler.domain.shares import Tenants
from opentinker_scheduler.garbage import collect_seldom
from opentinker_scheduler.ports import Transaction
from scripts.evidence_cases import Progress

PLOT = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "scheduler_growth.png"
SIZES = (1000, 2000, 4000, 6000, 8000, 10_000)
SERVERS, SLOTS, PROJECTS, ENDED = 1000, 2, 50, 7
ROUNDS, TICK_S = 30, 0.2
OPTIONS = ServerOptions(engine="noop", max_lora_rank=32, context_tokens=2048, ranks=1)
SLOT = SlotSpec(Role.TRAINER, "some-model", Tuning.LORA, 1, OPTIONS)


class Queue:
    """A database with servers that are full and jobs that wait."""

    def __init__(self, folder: Path, waiting: int) -> None:
        self.waiting = waiting
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.database = SqlDatabase(folder / f"{waiting}.db")
        limits = Limits(max_servers=SERVERS, trainer_slots=SLOTS)
        terms = Terms(limits, Tenants(), CrashBudget(3, timedelta(seconds=600)), "simulated")
        self._placing = Placing(terms)
        self._dice = random.Random(0)
        self._made = 0
        self._attended: set[str] = set()

    async def fill(self) -> None:
        await self.database.open(self.now)
        await self.database.run(self._fill)
        while len(await self.database.run(lambda tx: tx.assignments.active())) < SERVERS * SLOTS:
            await self.tick()

    async def tick(self) -> float:
        """One tick; milliseconds of it."""
        self.now += timedelta(seconds=TICK_S)
        seen = Observed((), (), (), (), frozenset(self._attended), {})

        def work(tx: Transaction) -> float:
            began = time.perf_counter()
            settle(tx, seen, self._placing, self.now)
            return 1000 * (time.perf_counter() - began)

        return await self.database.run(work)

    async def go_on(self) -> None:
        """Some jobs end, and as many come."""
        await self.database.run(self._go_on)

    def _fill(self, tx: Transaction) -> None:
        for number in range(SERVERS):
            server = Server(
                id=f"s{number}",
                role=Role.TRAINER,
                base_model=SLOT.base_model,
                options=OPTIONS,
                state=ServerState.READY,
                slots_total=SLOTS,
                launcher="simulated",
                start_time=self.now,
                register_time=self.now,
                instance_id=f"i{number}",
                pid=1,
            )
            tx.servers.add(server)
        self._submit(tx, self.waiting + SERVERS * SLOTS)

    def _submit(self, tx: Transaction, number: int) -> None:
        for _ in range(number):
            self._made += 1
            job = Job(
                id=f"j{self._made}",
                project=f"p{self._made % PROJECTS}",
                kind=JobKind.LORA_RL,
                slots=(SLOT,),
                state=JobState.QUEUED,
                create_time=self.now,
                queue_time=self.now + timedelta(milliseconds=self._made % 1000),
            )
            tx.jobs.add(job)
            self._attended.add(job.id)

    def _go_on(self, tx: Transaction) -> None:
        for assignment in tx.assignments.active():
            if assignment.state is AssignmentState.GRANTED:
                tx.assignments.save(replace(assignment, state=AssignmentState.READY))
        for assignment in self._dice.sample(list(tx.assignments.active()), ENDED):
            tx.assignments.save(replace(assignment, state=AssignmentState.ENDED))
            job = tx.jobs.find(assignment.job_id)
            assert job is not None
            tx.jobs.save(replace(job, state=JobState.SUCCEEDED, end_time=self.now))
        self._submit(tx, ENDED)


async def measure() -> dict[str, Any]:
    took: dict[int, list[float]] = {size: [] for size in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        queues = [Queue(Path(folder), size) for size in SIZES]
        for queue in queues:
            await queue.fill()
            # In this tick all 2,000 that got slots begin to run: that is not what is measured.
            await queue.go_on()
            await queue.tick()
        collect_seldom()
        for _ in range(ROUNDS):
            for queue in queues:
                await queue.go_on()
                took[queue.waiting].append(await queue.tick())
        for queue in queues:
            await queue.database.close()
    return {
        str(size): {
            "median_ms": round(statistics.median(times), 1),
            "low_ms": round(min(times), 1),
            "high_ms": round(max(times), 1),
        }
        for size, times in took.items()
    }


def draw(by_size: dict[str, Any]) -> None:
    """The curve, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [int(size) for size in by_size]
    middle = [found["median_ms"] for found in by_size.values()]
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    low, high = ([found[f"{end}_ms"] for found in by_size.values()] for end in ("low", "high"))
    axes.fill_between(sizes, low, high, alpha=0.2, label=f"range of {ROUNDS} ticks")
    axes.plot(sizes, middle, marker="o", label="median")
    axes.set(xlabel="jobs that wait", ylabel="milliseconds of a tick", ylim=(0, None))
    axes.set_title("A tick of the scheduler: 1,000 servers, 7 jobs ended, 7 started")
    axes.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=120)
    pyplot.close(figure)


def run(progress: Progress) -> dict[str, Any]:
    by_size = progress.part("ticks", lambda: asyncio.run(measure()))
    draw(by_size)
    first, last = (by_size[str(size)]["median_ms"] for size in (SIZES[0], SIZES[-1]))
    growth = round(last / first, 2)
    return {
        "by_waiting_jobs": by_size,
        "growth": growth,
        "plot": f"docs/evidence/{PLOT.name}",
        "bound": "less than ten times from 1,000 to 10,000",
        "within": growth < SIZES[-1] / SIZES[0],
    }
