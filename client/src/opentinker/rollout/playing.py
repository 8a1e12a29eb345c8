"""Groups under way: begun in order, handed out when they have ended, the oldest first."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from opentinker.rollout.groups import GroupPlayer
from opentinker.rollout.seats import Seats
from opentinker.rollout.stragglers import Stragglers
from opentinker.rollout.trajectory import Group


@dataclass(slots=True, eq=False)
class _Playing:
    ordinal: int
    batch: int
    started: float
    player: GroupPlayer
    task: asyncio.Task[Group]


class Playing:
    """The groups of one rollout. What is late in one batch is handed out with a later one."""

    def __init__(self, stragglers: Stragglers, concurrency: int, group_size: int) -> None:
        self._stragglers = stragglers
        self._seats = Seats(concurrency)
        self._group_size = group_size
        self._groups: list[_Playing] = []
        self._failed = asyncio.Event()
        self._news = asyncio.Event()
        """An episode or a group has ended."""

    @property
    def late(self) -> list[int]:
        """Ordinals of the groups that have been begun and not handed out."""
        return [each.ordinal for each in self._groups]

    async def batch(
        self,
        index: int,
        ordinals: Sequence[int],
        begin: Callable[[int, Callable[[], None]], GroupPlayer],
        play: Callable[[GroupPlayer], Awaitable[Group]],
    ) -> list[Group]:
        """Begin groups, each when there are seats for it, and hand out what has ended once the policy for
        stragglers lets the batch go on. `begin(ordinal, on_end)` makes the player, `play` has it play. What
        one of them raises is raised, and ends all.
        """
        try:
            for ordinal in ordinals:
                await self._seats.take(self._group_size)
                if self._failed.is_set():
                    break
                player = begin(ordinal, self._member_ended)
                task = asyncio.ensure_future(self._played(play, player))
                task.add_done_callback(lambda _: self._news.set())
                self._groups.append(_Playing(ordinal, index, time.monotonic(), player, task))
            await self._wait(index)
            ended = [each for each in self._groups if each.task.done()]
            self._groups = [each for each in self._groups if not each.task.done()]
            return [each.task.result() for each in ended]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End what is under way."""
        groups, self._groups = self._groups, []
        for each in groups:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in groups), return_exceptions=True)

    async def _played(self, play: Callable[[GroupPlayer], Awaitable[Group]], player: GroupPlayer) -> Group:
        try:
            return await play(player)
        except BaseException:
            self._failed.set()
            raise

    async def _wait(self, index: int) -> None:
        """Until no group is waited for any more, and there is one to hand out."""
        while pending := [each for each in self._groups if not each.task.done()]:
            self._news.clear()
            for each in self._groups:
                if each.task.done():
                    each.task.result()  # raises what it raised
            late = [each for each in pending if self._is_late(each, index)]
            for each in late:
                if not each.player.was_cut and self._stragglers.enough(each.player.ended):
                    each.player.cut()
            waited = [each for each in pending if each not in late or each.player.was_cut]
            if not waited and len(pending) < len(self._groups):
                return
            deadlines = [
                each.started + self._stragglers.deadline_s - time.monotonic()
                for each in waited
                if not each.player.was_cut and index - each.batch < self._stragglers.patience
            ]
            timeout = max(min(deadlines), 0.0) if deadlines and min(deadlines) < math.inf else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._news.wait()

    def _member_ended(self) -> None:
        self._seats.leave()
        self._news.set()

    def _is_late(self, group: _Playing, index: int) -> bool:
        """Whether the batch goes on without it."""
        overdue = time.monotonic() - group.started >= self._stragglers.deadline_s
        return overdue and index - group.batch < self._stragglers.patience
