"""What a scheduler counts: its queue, its servers, what it gives out, how long its ticks take.

All of it is what the last tick saw: whoever reads the metrics costs the database nothing.
"""

from collections import Counter
from collections.abc import Mapping

from opentinker_kit.metrics import Labels, Metrics
from opentinker_scheduler.application.settle import Settled
from opentinker_scheduler.domain.model import Job, JobState

_WAITS = {
    "waiting for its quota": "quota",
    "waiting for its client": "client",
    "waiting to be placed": "tick_limit",
    " trainer slot": "trainer_slots",
    " inference slot": "inference_slots",
    "queued": "not_looked_at_yet",
}


class SchedulerMetrics:
    """Told of each tick."""

    def __init__(self, metrics: Metrics) -> None:
        self._queue: Mapping[Labels, float] = {}
        self._jobs: Mapping[Labels, float] = {}
        self._servers: Mapping[Labels, float] = {}
        self._slots: Mapping[Labels, float] = {}
        self._known: frozenset[str] | None = None
        self._ticked = metrics.timer("opentinker_scheduler_tick_seconds", "Looking, deciding and acting.")
        self._granted = metrics.counter(
            "opentinker_scheduler_grants", "Slots that were given to jobs.", ("project",)
        )
        metrics.read(
            "opentinker_scheduler_queue",
            "Jobs that wait in the queue, by what they wait for.",
            lambda: self._queue,
            ("reason", "project"),
        )
        metrics.read(
            "opentinker_scheduler_jobs",
            "Jobs that have not ended.",
            lambda: self._jobs,
            ("state", "project"),
        )
        metrics.read(
            "opentinker_scheduler_servers",
            "Servers that have not ended.",
            lambda: self._servers,
            ("state", "role"),
        )
        metrics.read(
            "opentinker_scheduler_slots",
            "Slots of servers: those that are used, and all.",
            lambda: self._slots,
            ("role", "kind"),
        )

    def tick(self, settled: Settled, seconds: float) -> None:
        """See `reconciler.Watcher`."""
        self._ticked(seconds)
        jobs, queue, servers = Counter[Labels](), Counter[Labels](), Counter[Labels]()
        for job in settled.jobs:
            jobs[str(job.state), job.project] += 1
            if job.state is JobState.QUEUED:
                queue[waits_for(job), job.project] += 1
        for server in settled.servers:
            servers[str(server.state), str(server.role)] += 1
        self._jobs, self._queue, self._servers = jobs, queue, servers
        self._slots = self._count_slots(settled)
        self._count_grants(settled)

    def _count_slots(self, settled: Settled) -> Mapping[Labels, float]:
        slots: Counter[Labels] = Counter()
        roles = {server.id: str(server.role) for server in settled.servers}
        for server in settled.servers:
            slots[str(server.role), "all"] += server.slots_total
        for assignment in settled.assignments:
            if assignment.server_id in roles:
                slots[roles[assignment.server_id], "used"] += 1
        return slots

    def _count_grants(self, settled: Settled) -> None:
        known, self._known = self._known, frozenset(each.id for each in settled.assignments)
        if known is None:
            # Those that are there when a scheduler starts were given out by its predecessor.
            return
        projects = {job.id: job.project for job in settled.jobs}
        for assignment in settled.assignments:
            if assignment.id not in known:
                self._granted(1.0, projects.get(assignment.job_id, ""))


def waits_for(job: Job) -> str:
    """What a queued job waits for, as one of a few words; the text that people read has numbers in it."""
    return next((word for text, word in _WAITS.items() if text in job.state_reason), "other")
