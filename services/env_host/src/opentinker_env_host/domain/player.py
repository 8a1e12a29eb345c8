"""Plays one episode on whatever worker lives: the calls on it, its replay, its end.

When a worker dies, its episodes are played again from seed and actions on another one at their next call, and
go on only if every answer has the same digest as before. Callers hold the episode's lock.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from opentinker_env_host.domain.episode import Answered, Episode
from opentinker_env_host.domain.pool import WorkerPool
from opentinker_env_host.ports import (
    EnvironmentRaised,
    FailureSink,
    NoWorkerFree,
    OptionsRefused,
    Plain,
    Reply,
    Worker,
    WorkerError,
    WorkerLost,
    WorkerTimedOut,
    WorkerUnusable,
)
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

CLOSE_TIMEOUT_S = 5.0
MAX_CRASHES = 2
MAX_RESTORES = 16

T = TypeVar("T")


class Background:
    """Tasks that end by themselves, held until they do."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run it; what it raises goes to whoever awaits the task, or to nobody."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        """End what still runs."""
        for task in list(self._running):
            task.cancel()

    async def end(self) -> None:
        """End what still runs, and wait until it has."""
        self.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()


class Player:
    """See the module's text. Raises ServiceError."""

    def __init__(
        self,
        pools: Mapping[str, WorkerPool],
        failures: FailureSink,
        background: Background,
        *,
        journal_steps: int,
    ) -> None:
        self._pools = pools
        self._failures = failures
        self._background = background
        self._journal_steps = journal_steps

    async def begin(self, episode: Episode) -> Reply:
        """Reset the environment; the first observation."""
        reply, _ = await self._play(episode, lambda worker: self._reset(episode, worker))
        return reply

    async def warm(self, episode: Episode) -> None:
        """Play here what a host before this one played, so that its last answers are there again."""

        async def nothing(_: Worker) -> Reply:
            return Reply({}, (), "", 0.0)

        await self._play(episode, nothing)

    async def step(self, episode: Episode, action: Mapping[str, Any]) -> tuple[Reply, bool]:
        """Apply an action; whether the episode had to be played again before."""
        return await self._play(episode, lambda worker: self._apply(episode, worker, action))

    async def finalize(self, episode: Episode) -> Reply:
        """Ask for the return of the episode."""
        timeout = episode.recipe.step_timeout_s
        reply, _ = await self._play(
            episode, lambda worker: worker.call("finalize", timeout, episode=episode.name)
        )
        return reply

    async def snapshot(self, episode: Episode, name: str) -> Reply:
        """Have its worker take a snapshot: native, a copy that stays there, or none."""
        pool = self._pools[episode.recipe.environment]
        timeout = episode.recipe.step_timeout_s
        reply, _ = await self._play(
            episode,
            lambda worker: worker.call(
                "snapshot", timeout, episode=episode.name, snapshot=name, copy=pool.shared
            ),
        )
        return reply

    async def attach(self, episode: Episode, name: str, state: Plain | None, holder: Worker | None) -> bool:
        """Give an episode a snapshot's state: `state` on any worker, or the copy that `holder` has. False
        where that cannot be; it is then played again at its next call.
        """
        pool = self._pools[episode.recipe.environment]
        await self.detach(episode)
        try:
            if state is not None:
                worker = await pool.acquire(episode.name)
            elif holder is not None and pool.join(holder, episode.name):
                worker = holder
            else:
                return False
        except WorkerError as error:
            log.info("no worker for a fork", episode=episode.name, error=str(error))
            return False
        episode.worker = worker
        try:
            await worker.call(
                "fork",
                episode.recipe.step_timeout_s,
                episode=episode.name,
                snapshot=name,
                state=state,
                options=episode.recipe.options,
            )
        except WorkerError as error:
            log.warning("a snapshot was not restored", episode=episode.name, error=str(error))
            await self._let_go(episode)
            return False
        return True

    async def detach(self, episode: Episode) -> None:
        """Have it played again at its next call."""
        if episode.worker is not None and episode.worker.alive:
            try:
                await episode.worker.call("close", CLOSE_TIMEOUT_S, episode=episode.name)
            except WorkerError as error:
                log.info("episode did not close", episode=episode.name, error=str(error))
        await self._let_go(episode)

    async def free(self, episode: Episode) -> None:
        """Let the environment clean up, then give the worker back. Takes the episode's lock itself."""
        async with episode.lock:
            await self.detach(episode)

    async def _play(self, episode: Episode, call: Callable[[Worker], Awaitable[Reply]]) -> tuple[Reply, bool]:
        """Make a call on the episode's worker, on another one if that is dead; whether it was played
        again.
        """
        replayed = False
        while True:
            try:
                if episode.worker is None or not episode.worker.alive:
                    replayed = await self._restore(episode) or replayed
                assert episode.worker is not None
                reply = await call(episode.worker)
                if episode.on_trial:
                    episode.on_trial = False
                    self._pools[episode.recipe.environment].cleared(episode.name)
                return reply, replayed
            except WorkerLost as lost:
                episode.crashes += lost.suspect
                log.warning("episode lost its worker", episode=episode.name, error=str(lost))
                if episode.crashes >= MAX_CRASHES:
                    text = f"its worker died twice while it worked on this episode ({lost})"
                    raise await self._fail(episode, Reason.ENV_CRASHED, text, "ENV_CRASH") from None
            except WorkerTimedOut as error:
                raise await self._fail(episode, Reason.STEP_TIMEOUT, str(error), "STEP_TIMEOUT") from None
            except (EnvironmentRaised, OptionsRefused) as error:
                raise await self._fail(episode, Reason.ENV_CRASHED, str(error), "ENV_CRASH") from None
            except NoWorkerFree as error:
                raise ServiceError(Reason.OVERLOADED, str(error), retry_after_s=1.0) from None
            except WorkerUnusable as error:
                text = f"no worker starts for it: {error}"
                raise await self._fail(episode, Reason.ENV_CRASHED, text, "SANDBOX_LOST") from None

    async def _restore(self, episode: Episode) -> bool:
        """Give the episode a live worker and play there what was played; whether anything was."""
        pool = self._pools[episode.recipe.environment]
        await self._let_go(episode)
        if episode.begun:
            await self._check_replayable(episode, pool)
        # Who may have killed a worker is tried alone: a second death then ends nobody else.
        episode.on_trial = episode.crashes > 0
        episode.worker = await pool.acquire(episode.name, alone=episode.on_trial)
        if not episode.begun:
            return False
        try:
            await self._replay(episode, episode.worker)
        except EnvironmentRaised as error:
            raise await self._diverged(episode, f"raised where it had answered: {error}") from None
        log.info("episode played again", episode=episode.name, steps=len(episode.journal))
        return True

    async def _replay(self, episode: Episode, worker: Worker) -> None:
        first = reply = await self._reset(episode, worker)
        if reply.digest != episode.first_digest:
            raise await self._diverged(episode, "its first observation came out differently")
        for seq, turn in enumerate(episode.journal, start=1):
            reply = await self._apply(episode, worker, turn.action)
            if reply.digest != turn.digest:
                raise await self._diverged(episode, f"step {seq} came out differently")
        if episode.cold:
            episode.first = first
            episode.last_answer = Answered(reply, replayed=True) if episode.journal else None

    async def _check_replayable(self, episode: Episode, pool: WorkerPool) -> None:
        episode.restores += 1
        why = ""
        if pool.facts is not None and not pool.facts.deterministic:
            why = "its environment does not promise to repeat itself"
        elif len(episode.journal) > self._journal_steps:
            why = f"it has {len(episode.journal)} steps and at most {self._journal_steps} are replayed"
        elif episode.restores > MAX_RESTORES:
            why = f"it lost its worker {episode.restores} times"
        if why:
            text = f"the episode's worker died and the episode is not played again: {why}"
            raise await self._fail(episode, Reason.ENV_CRASHED, text, "SANDBOX_LOST")

    async def _diverged(self, episode: Episode, how: str) -> ServiceError:
        text = f"the episode's worker died, and played again {how}"
        return await self._fail(episode, Reason.ENV_CRASHED, text, "SANDBOX_LOST")

    async def _reset(self, episode: Episode, worker: Worker) -> Reply:
        recipe = episode.recipe
        return await worker.call(
            "begin",
            recipe.step_timeout_s,
            episode=episode.name,
            seed=recipe.seed,
            task=recipe.task,
            options=recipe.options,
        )

    async def _apply(self, episode: Episode, worker: Worker, action: Mapping[str, Any]) -> Reply:
        return await worker.call("step", episode.recipe.step_timeout_s, episode=episode.name, action=action)

    async def _fail(self, episode: Episode, reason: Reason, text: str, end_reason: str) -> ServiceError:
        """End the episode: from now on it answers with the error returned here."""
        log.warning("episode failed", episode=episode.name, reason=end_reason, text=text)
        metadata = {"episode": episode.name, "end_reason": end_reason}
        episode.failure = ServiceError(reason, text, metadata=metadata)
        self._background.start(self.free(episode))
        await self._failures.episode_failed(episode.name, episode.recipe.environment, end_reason)
        return episode.failure

    async def _let_go(self, episode: Episode) -> None:
        worker, episode.worker = episode.worker, None
        if worker is not None:
            await self._pools[episode.recipe.environment].release(episode.name, worker)
