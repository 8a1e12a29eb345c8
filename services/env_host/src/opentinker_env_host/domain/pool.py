"""The workers of one environment: warm, shared or exclusive, replaced when they die or have served enough.

Decides which worker an episode runs on; knows nothing of what an episode is.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from opentinker_env_host.ports import EnvironmentFacts, NoWorkerFree, Worker, WorkerLauncher, WorkerUnusable

log = structlog.get_logger()

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How many workers, and for how long."""

    warm: int
    max_workers: int
    episodes_per_worker: int
    """1: exclusive."""
    recycle_episodes: int
    recycle_bytes: int
    wait_s: float = 60.0
    """How long an episode waits for a worker."""


@dataclass(eq=False, slots=True)
class _Seat:
    worker: Worker
    episodes: set[str] = field(default_factory=set)
    served: int = 0
    retiring: bool = False
    """Takes no new episode and ends with its last one."""
    trial: bool = False
    """Only for episodes that are suspected to have killed a worker."""
    tried: str = ""
    """The one whose call is running there that may kill it again."""


class WorkerPool:
    """See the module's text. `start` before use, `stop` at the end."""

    def __init__(self, name: str, launcher: WorkerLauncher, limits: PoolLimits) -> None:
        self.name = name
        self.facts: EnvironmentFacts | None = None
        self.unusable = ""
        """Why its environment cannot be played; empty if it can."""
        self._launcher = launcher
        self._limits = limits
        self._seats: list[_Seat] = []
        self._starting = 0
        self._failures = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def workers(self) -> list[Worker]:
        """Those that live."""
        return [seat.worker for seat in self._seats if seat.worker.alive]

    async def start(self) -> None:
        """Start the first worker, and learn from it what the environment says about itself.

        If it cannot be played, that is tried again in the background, less and less often.
        """
        try:
            await self._hire()
        except WorkerUnusable:
            log.error("environment cannot be played", environment=self.name, error=self.unusable)
        self._refill()

    async def stop(self) -> None:
        """Kill every worker."""
        self._stopped = True
        if self._filling is not None:
            self._filling.cancel()
        for seat in self._seats:
            seat.worker.kill("the host stops")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def acquire(self, episode: str, *, alone: bool = False) -> Worker:
        """The worker for an episode; waits while an exclusive environment has none free.

        `alone`: it is suspected to have killed one, and goes where no other call runs until it is `cleared`.
        Raises NoWorkerFree after waiting for long, WorkerUnusable if none can be started.
        """
        seat = await self._seat(alone)
        seat.episodes.add(episode)
        seat.served += 1
        seat.retiring = seat.retiring or seat.served >= self._limits.recycle_episodes
        if alone:
            seat.trial, seat.tried = True, episode
        self._refill()
        return seat.worker

    def cleared(self, episode: str) -> None:
        """The call that it was suspected for was answered: its worker may take further suspects."""
        for seat in self._seats:
            if seat.tried == episode:
                seat.tried = ""
                self._notify()

    def join(self, worker: Worker, episode: str) -> bool:
        """Have an episode run where others do; whether that worker takes it."""
        for seat in self._seats:
            full = len(seat.episodes) >= self._limits.episodes_per_worker
            if seat.worker is worker and _is_open(seat) and not seat.trial and not full:
                seat.episodes.add(episode)
                seat.served += 1
                return True
        return False

    @property
    def shared(self) -> bool:
        """Whether episodes share workers."""
        return self._limits.episodes_per_worker > 1

    async def _seat(self, alone: bool) -> _Seat:
        exclusive = alone or self._limits.episodes_per_worker == 1
        give_up = asyncio.get_running_loop().time() + self._limits.wait_s
        while True:
            if self._stopped:
                raise WorkerUnusable("the host stops")
            changed, failures = self._changed, self._failures
            seat = self._choose_for_trial() if alone else self._choose(exclusive)
            if seat is None and self._may_hire(exclusive, alone):
                seat = await self._hire()
            if seat is not None and seat.worker.alive:
                return seat
            if seat is None:
                try:
                    async with asyncio.timeout_at(give_up):
                        await changed.wait()
                except TimeoutError:
                    waited = f"{self._limits.wait_s:g} s"
                    raise NoWorkerFree(f"no worker of {self.name} became free within {waited}") from None
                if self._failures > failures and not self.workers:
                    raise WorkerUnusable(self.unusable)

    def _may_hire(self, exclusive: bool, alone: bool) -> bool:
        if alone:
            return self._may_try_more()
        # Many who find a shared pool empty wait for one start, not for as many as there may be workers.
        return self._size() < self._limits.max_workers and (exclusive or self._starting == 0)

    async def release(self, episode: str, worker: Worker) -> None:
        """The episode no longer runs there."""
        for seat in self._seats:
            if seat.worker is worker and episode in seat.episodes:
                seat.episodes.discard(episode)
                if seat.tried == episode:
                    seat.tried = ""
                seat.retiring = seat.retiring or (seat.trial and not seat.episodes)
                self._end_if_spent(seat)
        self._notify()

    def check_memory(self) -> None:
        """Retire workers that hold too much."""
        for seat in self._seats:
            if not seat.retiring and seat.worker.resident_bytes() > self._limits.recycle_bytes:
                log.info("worker retires", worker=seat.worker.name, bytes=seat.worker.resident_bytes())
                seat.retiring = True
                self._end_if_spent(seat)

    def rest(self) -> None:
        """End the workers that nobody needs; the next episode waits for another to start."""
        for seat in self._seats:
            if not seat.episodes:
                seat.retiring = True
                self._end_if_spent(seat)

    def _choose(self, exclusive: bool) -> _Seat | None:
        """The free seat with the fewest episodes; None to start another worker (or wait for one)."""
        open_seats = [each for each in self._seats if _is_open(each) and not each.trial]
        if exclusive:
            return next((seat for seat in open_seats if not seat.episodes), None)
        if not open_seats:
            return None
        best = min(open_seats, key=lambda seat: len(seat.episodes))
        full = len(best.episodes) >= self._limits.episodes_per_worker
        return None if full and self._size() < self._limits.max_workers else best

    def _choose_for_trial(self) -> _Seat | None:
        """Where no other call runs. Those that were cleared there lose nothing by another death: they are
        played again.
        """
        free = [each for each in self._seats if _is_open(each) and not each.tried]
        repeats = self.facts is not None and self.facts.deterministic
        most = self._limits.episodes_per_worker if repeats else 1
        trials = [each for each in free if each.trial and len(each.episodes) < most]
        if not trials and self._may_try_more():
            trials = [each for each in free if not each.episodes]
        return min(trials, key=lambda seat: len(seat.episodes), default=None)

    def _may_try_more(self) -> bool:
        # A worker that dies under many calls leaves many suspects: they are tried one after the other.
        return sum(seat.trial for seat in self._seats) + self._starting < self._limits.max_workers

    def _size(self) -> int:
        return sum(seat.worker.alive and not seat.trial for seat in self._seats) + self._starting

    async def _hire(self) -> _Seat:
        self._starting += 1
        try:
            worker = await self._launcher.start()
        except WorkerUnusable as error:
            self.unusable = str(error)
            self._failures += 1
            raise
        finally:
            self._starting -= 1
            self._notify()
        seat = _Seat(worker)
        self._seats.append(seat)
        self.facts = worker.facts
        self.unusable = ""
        self._spawn(self._watch(seat))
        self._notify()
        if self._stopped:
            worker.kill("the host stops")
        return seat

    async def _watch(self, seat: _Seat) -> None:
        how = await seat.worker.wait()
        self._seats.remove(seat)
        if not self._stopped:
            if not seat.retiring:
                log.warning("worker ended", worker=seat.worker.name, how=how, episodes=len(seat.episodes))
            self._refill()
            self._notify()

    def _notify(self) -> None:
        """Wake who waits for a worker."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _end_if_spent(self, seat: _Seat) -> None:
        if seat.retiring and not seat.episodes and seat.worker.alive:
            seat.worker.kill("retired")

    def _refill(self) -> None:
        if self._filling is None and not self._stopped and self._missing():
            self._filling = self._spawn(self._fill(), self._filled)

    def _missing(self) -> bool:
        ready = [each for each in self._seats if _is_open(each) and not each.trial]
        if self._limits.episodes_per_worker == 1:
            ready = [seat for seat in ready if not seat.episodes]
        return (
            len(ready) < self._limits.warm and self._size() < self._limits.max_workers and self._starting == 0
        )

    async def _fill(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopped and self._missing():
            try:
                await self._hire()
            except Exception as error:  # whatever it is, episodes go on and the next start may work
                log.warning("worker does not start", pool=self.name, error=str(error), again_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _filled(self) -> None:
        self._filling = None
        self._refill()

    def _spawn(
        self, work: Coroutine[Any, Any, None], then: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("pool task failed", environment=self.name, error=repr(error))
            if then is not None and not self._stopped:
                then()

        task.add_done_callback(done)
        return task


def _is_open(seat: _Seat) -> bool:
    """Whether it takes episodes."""
    return seat.worker.alive and not seat.retiring
