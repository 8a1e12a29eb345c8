"""Whether a job that does not fit now would fit once certain others have ended."""

from collections.abc import Collection
from dataclasses import dataclass

from opentinker_scheduler.domain.floor import Capacity, Demand, Floor, NewServer, Placement


@dataclass(frozen=True, slots=True)
class Later:
    """How it would fit."""

    placements: tuple[Placement, ...]
    launched: tuple[NewServer, ...]
    """Servers that are to be started for it then."""
    stopped: tuple[Capacity, ...]
    """Servers of other kinds that are without work then, and can make room."""


class Outlook:
    """A floor as one job sees it: without what is kept for others. `going_on` are the jobs that have not
    given up their slots; what nobody of them holds but is not freed yet is as good as free.
    """

    def __init__(self, demand: Demand, floor: Floor, going_on: Collection[str]) -> None:
        self._demand = demand
        self._floor = floor
        here = [one for one in floor.servers if one.hold is None]
        self.jobs = frozenset(job for one in here for job in one.jobs)
        """Jobs that are on these servers."""
        self._leaving = self.jobs - frozenset(going_on)
        self.useful = [one for one in here if any(map(one.suits, demand.needs))]
        useful = {one.server_id for one in self.useful}
        self._others = [one for one in here if one.launched and one.server_id not in useful]

    def without(self, jobs: Collection[str]) -> Later | None:
        """How the job would fit once these have ended, if it would."""
        ended = self.ended(jobs)
        stopped = tuple(one for one in self._others if one.jobs <= ended)
        then = [one.without(ended) for one in self.useful if one.free or not one.jobs.isdisjoint(ended)]
        later = self._floor.after(then, stopped)
        placed = later.place(self._demand)
        if not isinstance(placed, tuple):
            return None
        return Later(placed, tuple(later.launched), stopped)

    def ended(self, jobs: Collection[str]) -> frozenset[str]:
        """Those and the ones that are leaving anyway."""
        return self._leaving | frozenset(jobs)
