"""Estimates of when waiting jobs start, made anew as often as they cost next to nothing."""

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from opentinker_scheduler.domain.estimates import Durations, soonest, starts, steady
from opentinker_scheduler.domain.floor import Capacity, Demand
from opentinker_scheduler.domain.model import Job
from opentinker_scheduler.domain.planner import Plan
from opentinker_scheduler.domain.shares import NOTHING, first, over_quota
from opentinker_scheduler.ports import Transaction

_HEAD = 500
"""So many of the queue get an estimate: of who is further back there is little to say."""
_RECENT = 200
"""So many jobs that ended are looked at, every _RECENT_S."""
_RECENT_S = 30.0
_PART = 0.01
"""Of the time, so much is spent on estimates."""


class Estimates:
    """Remembers what was estimated last."""

    def __init__(self) -> None:
        self._starts: dict[str, datetime] = {}
        self._durations = Durations()
        self._read_at: datetime | None = None
        self._rests_until = 0.0

    def of(self, job_id: str) -> datetime | None:
        """When a job starts; None where nobody can say."""
        return self._starts.get(job_id)

    def look(
        self,
        tx: Transaction,
        plan: Plan,
        servers: Sequence[Capacity],
        jobs: Mapping[str, Job],
        now: datetime,
    ) -> None:
        """Estimate anew how it goes on after a plan, unless that was done a moment ago. `servers` and `jobs`
        as they are after it.
        """
        began = time.perf_counter()
        if not plan.queue:
            self._starts.clear()
        if not plan.queue or began < self._rests_until:
            return
        if self._read_at is None or abs((now - self._read_at).total_seconds()) >= _RECENT_S:
            self._durations, self._read_at = Durations(tx.jobs.held(_RECENT)), now
        ends_s = {job.id: self._rest_s(job, now) for job in jobs.values() if job.state.placed}
        head = first(plan.queue, plan.shares, _HEAD)
        found = starts(
            _allowed(head, plan), servers, ends_s, lambda demand: self._rest_s(jobs[demand.job_id], now)
        )
        self._starts = {
            job_id: steady(self._starts.get(job_id), _at(now, start_s), now)
            for job_id, start_s in found.items()
        }
        ended = time.perf_counter()
        self._rests_until = ended + (ended - began) / _PART

    def _rest_s(self, job: Job, now: datetime) -> float | None:
        """How long a job will hold slots, from now or from when it gets them."""
        held_s = job.held_until(now)
        limit_s = max(0.0, job.max_duration_s - held_s) if job.max_duration_s > 0 else None
        return soonest(limit_s, self._durations.rest_s(job.kind, held_s))


def _allowed(head: Iterable[Demand], plan: Plan) -> list[Demand]:
    """Those who do not wait for a quota: when that lets them start is another question."""
    held = plan.shares.held
    return [
        demand
        for demand in head
        if not over_quota(demand.project, demand.cost, plan.shares, held.get(demand.project, NOTHING))
    ]


def _at(now: datetime, start_s: float) -> datetime:
    """In whole seconds: more says too much."""
    return (now + timedelta(seconds=start_s)).replace(microsecond=0)
