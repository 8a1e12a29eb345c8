"""Episodes and the calls on them: open, begin, step, finalize, close, leases.

Callers run the calls on an episode in tasks that `keep` makes, so that one who gives up and asks again finds
the answer. How an episode is played, and played again when its worker died, is in `player`.
"""

import asyncio
import contextlib
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from opentinker_env_host.domain.answers import FirstAnswers
from opentinker_env_host.domain.episode import Answered, Episode, Recipe, not_found
from opentinker_env_host.domain.forks import Forks
from opentinker_env_host.domain.packages import is_key
from opentinker_env_host.domain.player import Background, Player
from opentinker_env_host.domain.pool import WorkerPool
from opentinker_env_host.domain.questions import Questions
from opentinker_env_host.ports import (
    EnvironmentFacts,
    FailureSink,
    Journal,
    NoJournal,
    Reply,
)
from opentinker_kit.clock import Clock
from opentinker_kit.errors import ServiceError
from opentinkerapi.runtime.reasons import Reason

log = structlog.get_logger()

REAP_EVERY_S = 0.5
MEMORY_EVERY = 20
"""Rounds of the reaper between two looks at the workers' memory."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the host takes."""

    max_episodes: int
    max_group_size: int
    journal_steps: int
    project_episodes: int | None = None
    """Open episodes of one project; None: no limit."""


@dataclass(frozen=True, slots=True)
class Group:
    """Episodes that were opened together."""

    name: str
    episodes: tuple[str, ...]


class EnvironmentHost:
    """See the module's text. All methods raise ServiceError."""

    def __init__(
        self,
        pools: Mapping[str, WorkerPool],
        limits: HostLimits,
        clock: Clock,
        failures: FailureSink,
        journal: Journal | None = None,
    ) -> None:
        self._pools = dict(pools)
        self._limits = limits
        self._clock = clock
        self._failures = failures
        self._journal = journal or NoJournal()
        self._episodes: dict[str, Episode] = {}
        self._answers: FirstAnswers[Group] = FirstAnswers(clock)
        self._questions = Questions()
        self._background = Background()
        self._player = Player(self._pools, failures, self._background, journal_steps=limits.journal_steps)
        self.forks = Forks(self, self._player, clock, limits.journal_steps)
        self._started = False
        self.opened: Counter[str] = Counter()
        """Episodes so far, by environment."""
        self.steps: Counter[str] = Counter()
        self.env_seconds: dict[str, float] = defaultdict(float)
        """Time inside environments, by environment."""
        self._of_projects: Counter[str] = Counter()
        self.draining = False

    def check_started(self) -> None:
        """ServiceError SERVER_STARTING until it is."""
        if not self._started:
            raise _starting()

    @property
    def playable(self) -> dict[str, WorkerPool]:
        """The environments of the settings that can be played, by name."""
        self.check_started()
        return {
            name: pool for name, pool in self._pools.items() if pool.facts is not None and not is_key(name)
        }

    def is_hosted(self, environment: str) -> bool:
        """Whether it is one of the settings, which all projects see."""
        return environment in self._pools and not is_key(environment)

    def open_pool(self, key: str, pool: WorkerPool) -> None:
        """Have an uploaded environment played by these workers, which are started when they are needed."""
        self._pools[key] = pool

    async def close_pool(self, key: str) -> None:
        """End the workers of an uploaded environment that has no open episodes."""
        if (pool := self._pools.pop(key, None)) is not None:
            await pool.stop()

    def rest_pool(self, key: str) -> None:
        """End those of its workers that nobody needs now."""
        if (pool := self._pools.get(key)) is not None:
            pool.rest()

    def facts(self, environment: str) -> EnvironmentFacts:
        """What a playable environment says about itself."""
        facts = self.pool(environment).facts
        assert facts is not None
        return facts

    @property
    def open_episodes(self) -> int:
        """How many episodes are open."""
        return len(self._episodes)

    def open_by_environment(self) -> Counter[str]:
        """How many are open, by environment."""
        return Counter(episode.recipe.environment for episode in self._episodes.values())

    def workers_by_environment(self) -> Counter[str]:
        """How many worker processes live, by environment."""
        return Counter({name: len(pool.workers) for name, pool in self._pools.items()})

    async def start(self) -> None:
        """Start the pools; one that fails leaves the others alone. Episodes that a host before this one had
        are played again when they are asked for, and have until then a lease of their whole time.
        """
        for episode in self._journal.load():
            if episode.recipe.environment in self._pools:
                episode.renew(self._clock.monotonic())
                self._episodes[episode.name] = episode
                self._of_projects[episode.project] += 1
        await asyncio.gather(*(pool.start() for name, pool in self._pools.items() if not is_key(name)))
        self._started = True

    async def stop(self) -> None:
        """Kill all workers; what was running fails here, and goes on where the host is started again."""
        self._journal.close()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        self._background.cancel()

    def pool(self, environment: str, field: str = "environment") -> WorkerPool:
        """The pool of a playable environment."""
        playable = self.playable
        pool = self._pools.get(environment)
        if pool is None or (is_key(environment) and pool.facts is None):
            known = ", ".join(sorted(playable)) or "none"
            raise ServiceError(
                Reason.UNKNOWN_ENVIRONMENT,
                f"no environment {environment!r} here; known: {known}",
                field=field,
            )
        if pool.facts is None:
            raise ServiceError(
                Reason.MISSING_DEPENDENCY, f"environment {environment!r} cannot be played: {pool.unusable}"
            )
        return pool

    async def list_tasks(
        self, environment: str, split: str, options: Mapping[str, Any], offset: int, limit: int
    ) -> tuple[list[Mapping[str, Any]], int]:
        """A page of a split's tasks and how many there are."""
        pool = self.pool(environment)
        splits = self.facts(environment).splits
        if split not in splits:
            known = ", ".join(splits) or "none; its tasks are drawn from the seed"
            raise ServiceError(
                Reason.INVALID_FIELD, f"{environment} has no split {split!r}; known: {known}", field="split"
            )
        reply = await self._questions.ask(
            pool, "tasks", split=split, options=options, offset=offset, limit=limit
        )
        tasks = reply.answer["tasks"]
        if tasks is None:
            raise ServiceError(
                Reason.INVALID_FIELD,
                f"{environment} draws the tasks of split {split!r} from the seed and has no list of them",
                field="split",
                metadata={"tasks": "drawn"},
            )
        return tasks, reply.answer["total"]

    async def open_group(
        self,
        request_id: str,
        recipe: Recipe,
        size: int,
        owner: str = "",
        project: str = "",
        *,
        asked: str = "",
    ) -> Group:
        """Open the episodes of a group, for the job `owner` of a project alone where one is named; a
        repetition gets the first answer. `asked` is what the caller called the environment.
        """
        if self.draining:
            raise ServiceError(Reason.DRAINING, "this host is shutting down; open episodes elsewhere")
        body = json.dumps(
            [asked or recipe.environment, recipe.seed, recipe.task, recipe.options, size], sort_keys=True
        )
        return await self._answers.get(
            request_id, body, lambda: self._open_group(recipe, size, owner, project), scope=owner
        )

    async def _open_group(self, recipe: Recipe, size: int, owner: str, project: str) -> Group:
        pool = self.pool(recipe.environment)
        self.check_group(size, project)
        await self._questions.check_options(pool, recipe.options)
        # Meanwhile others were opened, or the environment was deleted.
        self.check_group(size, project)
        self.pool(recipe.environment)
        now = self._clock.monotonic()
        group = secrets.token_hex(8)
        names = tuple(f"episodes/{group}-{member}" for member in range(size))
        made = [Episode(name, recipe, now + recipe.lease_ttl_s, owner, project) for name in names]
        self.adopt(made)
        return Group(f"groups/{group}", names)

    def adopt(self, episodes: Sequence[Episode]) -> None:
        """Have these among the open ones."""
        for episode in episodes:
            self._episodes[episode.name] = episode
            self._of_projects[episode.project] += 1
            self.opened[episode.recipe.environment] += 1
            if episode.begun:
                self._journal.moved(episode)
        self._journal.opened([episode for episode in episodes if not episode.begun])

    def moved(self, episode: Episode) -> None:
        """It is at another place than its last answers say."""
        self._journal.moved(episode)

    def commit(self) -> None:
        """Have all that was done so far survive this process. Comes before each answer, once for all that go
        out together.
        """
        self._journal.flush()

    def keep(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a call to its end even if the caller goes away; shield the task where it is awaited."""
        return self._background.start(work)

    async def begin(self, name: str, owner: str = "") -> Reply:
        """The first observation."""
        return await self._begin(self.episode(name, owner))

    async def step(
        self, name: str, seq: int, key: bytes, action: Mapping[str, Any], owner: str = ""
    ) -> Answered:
        """Play one step, or give the stored answer of the last one. `key` identifies the request's
        actions.
        """
        return await self._step(self.episode(name, owner), seq, key, action)

    async def finalize(self, name: str, last_seq: int = 0, owner: str = "") -> Reply:
        """The return of the episode; refused where the caller was given more steps than are known here."""
        return await self._finalize(self.episode(name, owner), last_seq)

    async def close(self, names: Sequence[str], owner: str = "") -> None:
        """Free episodes; unknown ones, and those of others, are passed over."""
        for name in names:
            if self._exists(name, owner):
                episode = self._episodes.pop(name)
                episode.closed = True
                self._journal.closed(name)
                self._of_projects[episode.project] -= 1
                if not self._of_projects[episode.project]:
                    del self._of_projects[episode.project]
                self._background.start(self._player.free(episode))

    def renew(self, names: Sequence[str], owner: str = "") -> tuple[list[str], float]:
        """Renew leases; those that are gone, and how long the shortest of the others now lasts."""
        now = self._clock.monotonic()
        known = [self._episodes[name] for name in names if self._exists(name, owner)]
        for episode in known:
            episode.renew(now)
        lost = [name for name in names if not self._exists(name, owner)]
        return lost, min((episode.recipe.lease_ttl_s for episode in known), default=0.0)

    async def reap_forever(self) -> None:
        """End episodes whose lease is over; look at the workers' memory now and then."""
        rounds = 0
        while True:
            await self._clock.sleep(REAP_EVERY_S)
            await self.reap()
            rounds += 1
            if rounds % MEMORY_EVERY == 0:
                for pool in list(self._pools.values()):
                    pool.check_memory()
                await self.forks.tidy()
                self._journal.tidy(list(self._episodes.values()))

    async def reap(self) -> None:
        """End the episodes whose lease is over."""
        now = self._clock.monotonic()
        expired = [episode for episode in self._episodes.values() if episode.expires_at <= now]
        for episode in expired:
            log.info("lease expired", episode=episode.name)
            await self.close([episode.name])
            await self._failures.episode_failed(episode.name, episode.recipe.environment, "LEASE_EXPIRED")

    def _exists(self, name: str, owner: str) -> bool:
        """Whether there is such an episode for a job; for who names no job there are all."""
        episode = self._episodes.get(name)
        return episode is not None and owner in ("", episode.owner)

    def episode(self, name: str, owner: str) -> Episode:
        """An open one of a job, whose lease starts anew. EPISODE_NOT_FOUND."""
        if not self._started:
            raise _starting()
        if not self._exists(name, owner):
            raise not_found(name)
        episode = self._episodes[name]
        episode.renew(self._clock.monotonic())
        return episode

    @contextlib.asynccontextmanager
    async def at(self, episode: Episode) -> AsyncIterator[None]:
        """Work on an episode that answers, alone, and with its answers at hand. Once it failed it is not kept
        for a host that comes after this one.
        """
        async with episode.lock:
            episode.check_alive()
            try:
                if episode.cold:
                    await self._player.warm(episode)
                yield
            except ServiceError:
                if episode.failure is not None:
                    self._journal.closed(episode.name)
                raise

    async def _begin(self, episode: Episode) -> Reply:
        async with self.at(episode):
            if episode.first is None:
                if self.draining:
                    raise ServiceError(Reason.DRAINING, "this host is shutting down; open episodes elsewhere")
                episode.first = await self._player.begin(episode)
                episode.first_digest = episode.first.digest
                self._journal.begun(episode)
            return episode.first

    async def _step(self, episode: Episode, seq: int, key: bytes, action: Mapping[str, Any]) -> Answered:
        async with self.at(episode):
            stored = episode.check_step(seq, key)
            if stored is not None:
                return stored
            episode.check_movers(action)
            answered = Answered(*await self._player.step(episode, action))
            episode.record(seq, key, action, answered)
            self._journal.stepped(episode)
            self.steps[episode.recipe.environment] += 1
            self.env_seconds[episode.recipe.environment] += answered.reply.env_s
            return answered

    async def _finalize(self, episode: Episode, last_seq: int) -> Reply:
        async with self.at(episode):
            if last_seq:
                episode.check_last(last_seq)
            if episode.first is None:
                raise ServiceError(Reason.INVALID_STATE, f"{episode.name} has not begun: call Begin first")
            if episode.result is None:
                episode.result = await self._player.finalize(episode)
            return episode.result

    def check_group(self, size: int, project: str) -> None:
        """ServiceError unless so many more episodes of a project are taken."""
        if not 1 <= size <= self._limits.max_group_size:
            text = f"size must be from 1 to {self._limits.max_group_size}, not {size}"
            raise ServiceError(Reason.INVALID_FIELD, text, field="size")
        if self.draining:
            raise ServiceError(Reason.DRAINING, "this host is shutting down; open episodes elsewhere")
        most = self._limits.project_episodes
        held = self._of_projects[project] if project else 0
        if project and most is not None and held + size > most:
            text = f"{held} of the {most} episodes that a project may have open are; close some"
            raise ServiceError(Reason.QUOTA_EXCEEDED, text, quota=[(f"projects/{project}", text)])
        if len(self._episodes) + size > self._limits.max_episodes:
            raise ServiceError(
                Reason.OVERLOADED,
                f"{len(self._episodes)} episodes are open and {self._limits.max_episodes} is the limit: "
                "close some, or come back",
                retry_after_s=1.0,
            )


def _starting() -> ServiceError:
    return ServiceError(Reason.SERVER_STARTING, "the first workers are still starting", retry_after_s=0.5)
