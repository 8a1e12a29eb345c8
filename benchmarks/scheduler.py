"""The scheduler under load: the real one over gRPC, with simulated servers and clients in another process.

Cases: `assign` (from a slot being free, with jobs in line for it, to its server having the next one: 99th
percentile, over one tick), `jain` (how evenly projects get slots, one of which asks for more than others),
`create` (milliseconds of CreateJob; decisions, memory, and how a tick grows with the queue beside it) and
`small_wait` (95th percentile of the wait of small jobs among large ones, over that of a strict queue of the
same jobs in which no time is lost).
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.pairs import Options
from benchmarks.queue_cloud import Cloud, Life
from benchmarks.queue_math import Work, jain, makespan, percentile, strict_fifo
from benchmarks.results import Result, interval_of_median

SERVERS, SLOTS, JOBS, TENANTS = 1000, 2, 10_000, 50
SECONDS = (30.0, 90.0)
"""Jobs of the crowd run for so long."""
LOUD = 0.2
"""Part of all jobs that one project submits."""
MIX_SERVERS, MIX_SLOTS, MIX_JOBS = 8, 8, 400
TICK_S = 0.2
_AT_ONCE = 32
_GRACE_S = 600.0


def run(options: Options, scale: float = 1.0) -> Iterable[Result]:
    if any(map(options.wants, ("assign", "jain", "create"))):
        for result in asyncio.run(_crowd(scale)):
            if options.wants(result.case):
                yield result
    if options.wants("small_wait"):
        yield asyncio.run(_mix(scale))


async def _crowd(scale: float) -> list[Result]:
    """Many projects on a cluster that is full."""
    servers, jobs = max(4, int(SERVERS * scale)), max(100, int(JOBS * scale))
    tenants = max(5, int(TENANTS * scale)) if scale < 1 else TENANTS
    dice = random.Random(0)
    projects = [f"t{number}" for number in range(tenants)]
    loud = int(LOUD * jobs)
    asking = [projects[0]] * loud + [projects[1 + n % (tenants - 1)] for n in range(jobs - loud)]
    dice.shuffle(asking)
    works = [Work(1, dice.uniform(*SECONDS)) for _ in asking]
    with tempfile.TemporaryDirectory(prefix="ot-scheduler-") as folder:
        async with Cloud(Path(folder), servers, SLOTS) as cloud:
            begun = time.perf_counter()
            await _submit(cloud, works, asking)
            submitted = time.perf_counter()
            sys.stderr.write(f"{jobs} jobs submitted in {submitted - begun:.1f} s\n")
            last = await _watch(cloud, asking, projects)
            # By then every slot was given out at least once with everyone in line.
            full = sorted(life.start for life in cloud.lives.values() if life.start)[servers * SLOTS - 1]
            first = max(submitted, full + SECONDS[1])
            if first >= last:
                raise RuntimeError(f"a project was served before all {jobs} jobs could be submitted")
            ticks = await cloud.ticks()
            memory = cloud.memory_bytes()
    lives = list(cloud.lives.values())
    raw: dict[str, object] = {
        "servers": servers,
        "slots": servers * SLOTS,
        "jobs": jobs,
        "projects": tenants,
        "window_s": round(last - first, 1),
    }
    waits = [wait for at, wait in cloud.waits if submitted <= at <= last]
    parts = [percentile(half, 0.99) / TICK_S for half in _slices(waits, 10)]
    middle, low, high = interval_of_median(parts)
    whole = percentile(waits, 0.99) / TICK_S
    shown = {"p50_ms": 1000 * percentile(waits, 0.5), "p99_ms": 1000 * percentile(waits, 0.99)}
    assign = Result(
        "scheduler",
        "assign",
        whole,
        "lower",
        min(low, whole),
        max(high, whole),
        len(waits),
        "one tick",
        raw | shown,
    )
    held = dict.fromkeys(projects, 0.0)
    for life in lives:
        if life.start:
            held[life.project] += max(0.0, min(life.end or last, last) - max(life.start, first))
    index = jain(held.values())
    loudest = held[projects[0]] / (sum(held.values()) / tenants)
    fair = Result(
        "scheduler",
        "jain",
        index,
        "higher",
        index,
        index,
        1,
        "all the same",
        raw | {"loudest": round(loudest, 3)},
    )
    calls = [1000 * (life.answered - life.create) for life in lives]
    middle, low, high = interval_of_median(calls)
    decisions = sum(submitted <= at <= last for at in cloud.assigned) / (last - submitted)
    more = {
        "p50_ms": percentile(calls, 0.5),
        "p99_ms": percentile(calls, 0.99),
        "created_per_s": round(jobs / (submitted - begun), 1),
        "decisions_per_s": round(decisions, 1),
        "memory_mib": memory >> 20,
        "tick_ms_by_jobs": _growth(ticks, lives),
    }
    create = Result("scheduler", "create", middle, "lower", low, high, len(calls), "none: ms", raw | more)
    return [assign, fair, create]


async def _submit(
    cloud: Cloud, works: Sequence[Work], projects: Sequence[str], limited: bool = False
) -> None:
    """Create jobs in order, some at once."""
    waiting = iter(list(enumerate(zip(works, projects, strict=True))))

    async def one_after_the_other() -> None:
        for number, (work, project) in waiting:
            await cloud.submit(work, project, f"create-{number}", limited)

    await asyncio.gather(*(one_after_the_other() for _ in range(_AT_ONCE)))


async def _watch(cloud: Cloud, asking: Sequence[str], projects: Sequence[str]) -> float:
    """Until a project has nothing more waiting; when that is."""
    deadline = time.perf_counter() + _GRACE_S
    wanted = {project: asking.count(project) for project in projects}
    while True:
        started = dict.fromkeys(projects, 0)
        for life in cloud.lives.values():
            if life.project:
                started[life.project] += bool(life.start)
        now = time.perf_counter()
        if any(started[project] >= wanted[project] for project in projects):
            return now
        if now > deadline:
            raise RuntimeError(f"{sum(started.values())} of {len(asking)} jobs started in {_GRACE_S:g} s")
        await asyncio.sleep(1.0)


def _growth(ticks: Sequence[tuple[float, float]], lives: Sequence[Life]) -> dict[str, float]:
    """Median milliseconds of a tick, by how many thousands of jobs had been created and not ended."""
    created = sorted(life.answered for life in lives)
    ended = sorted(life.end for life in lives if life.end)
    groups: dict[int, list[float]] = {}
    for at, spent in ticks:
        jobs = bisect(created, at) - bisect(ended, at)
        groups.setdefault(jobs // 1000, []).append(spent)
    return {f"{key}k": round(1000 * statistics.median(groups[key]), 1) for key in sorted(groups)}


def _slices(values: Sequence[float], number: int) -> list[Sequence[float]]:
    size = max(1, len(values) // number)
    return [values[at : at + size] for at in range(0, size * number, size) if values[at : at + size]]


async def _mix(scale: float) -> Result:
    """Small jobs among large ones, in one project, all with time limits."""
    jobs, slots = max(30, int(MIX_JOBS * scale)), MIX_SERVERS * MIX_SLOTS
    dice = random.Random(1)
    works: list[Work] = []
    for _ in range(jobs):
        large = dice.random() < 0.15
        works.append(
            Work(dice.randint(slots // 3, slots), float(dice.randint(4, 10)))
            if large
            else Work(1, float(dice.randint(1, 5)))
        )
    with tempfile.TemporaryDirectory(prefix="ot-scheduler-") as folder:
        async with Cloud(Path(folder), MIX_SERVERS, MIX_SLOTS) as cloud:
            begun = time.perf_counter()
            await _submit(cloud, works, ["default"] * jobs, limited=True)
            deadline = time.perf_counter() + _GRACE_S
            while not all(life.end for life in cloud.lives.values()):
                if time.perf_counter() > deadline:
                    raise RuntimeError(f"not all of {jobs} jobs ended in {_GRACE_S:g} s")
                await asyncio.sleep(0.5)
            lives = sorted(cloud.lives.values(), key=lambda life: life.create)
    trace = [Work(one.work.slots, one.work.seconds, one.create - begun) for one in lives]
    strict = strict_fifo(trace, slots)
    ours = [life.start - life.create for life in lives if life.work.slots == 1]
    theirs = [start - work.submit for start, work in zip(strict, trace, strict=True) if work.slots == 1]
    ratio = percentile(ours, 0.95) / percentile(theirs, 0.95)
    raw = {
        "jobs": jobs,
        "slots": slots,
        "ours_p95_s": round(percentile(ours, 0.95), 2),
        "strict_p95_s": round(percentile(theirs, 0.95), 2),
        "large_p95_s": round(percentile([i.start - i.create for i in lives if i.work.slots > 1], 0.95), 2),
        "makespan_over_strict": round(max(life.end for life in lives) - begun, 2) / makespan(trace, strict),
    }
    return Result("scheduler", "small_wait", ratio, "lower", ratio, ratio, 1, "a strict queue", raw)
