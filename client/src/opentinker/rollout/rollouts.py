"""Batches of groups from a policy in an environment, one batch after the other.

    async for batch in rollouts(policy, env, groups=8, group_size=8): ...

Each batch is sampled at the version that the policy has when the batch begins. Tasks come in the order of
their ordinals; a static data set is shuffled anew each epoch, as a pure function of the seed.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from opentinker import errors
from opentinker.environments.base import Task
from opentinker.environments.content import plain_json
from opentinker.environments.errors import InvalidEpisodeData
from opentinker.environments.sources import EnvironmentSource, EnvironmentSpec, environment_source
from opentinker.rollout.cast import MAIN, Casting
from opentinker.rollout.groups import GroupPlayer, Play, Setting
from opentinker.rollout.limits import Limits
from opentinker.rollout.playing import Playing
from opentinker.rollout.recorded_agent import check_loop
from opentinker.rollout.seats import MAX_EPISODES
from opentinker.rollout.stragglers import Stragglers, WaitAll
from opentinker.rollout.trajectory import Batch, Group
from opentinker.sampling import identity
from opentinker.sampling.meter import EngineMeter
from opentinker.sampling.params import SamplingParams

if TYPE_CHECKING:
    from opentinker.training.policy import Policy

TRAIN = "train"


class Rollouts:
    """An endless asynchronous iterator of batches. `next_ordinal` is the data cursor."""

    def __init__(
        self,
        policy: "Policy",
        env: EnvironmentSpec | EnvironmentSource,
        *,
        groups: int,
        group_size: int,
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        split: str = TRAIN,
        shuffle: bool = True,
        start: int = 0,
        version: int | None = None,
        scope: str | None = None,
        concurrency: int = MAX_EPISODES,
        keep: bool = True,
        agents: Mapping[str, Any] | None = None,
        policies: Mapping[str, "Policy"] | None = None,
        league: bool = True,
        stragglers: Stragglers | None = None,
    ) -> None:
        """`policies` are those of a run by name, the first of them `policy`; `league`: results count for the
        pools of opponents.
        """
        for name, value in {
            "groups": groups,
            "group_size": group_size,
            "concurrency": concurrency,
        }.items():
            if value < 1:
                raise errors.invalid(name, f"must be at least 1, not {value}")
        self._policy = policy
        self._env = env
        self._options = options
        self._groups = groups
        self._group_size = group_size
        self._keep = keep
        self._params = params or SamplingParams()
        self._params.check_tokens_only("sampling")
        self._limits = limits or Limits()
        self._seed = seed
        self._split = split
        self._shuffle = shuffle
        self._version = version
        self._scope = scope or uuid.uuid4().hex
        self._casting = Casting(policies or {MAIN: policy}, agents, seed=seed)
        self._league = league
        self._setting: Setting | None = None
        self._tasks: Sequence[Task] | None = None
        self._given: Sequence[Task] | None = None
        self._playing = Playing(stragglers or WaitAll(), concurrency, group_size)
        self._meter = EngineMeter()
        self._index = 0
        self._shuffled: tuple[int, NDArray[np.int64]] | None = None
        self.next_ordinal = start

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        return await self._policy.portal.bridge(self.next_batch(self._groups))

    async def next_batch(self, groups: int) -> Batch:
        """The next batch, with that many groups. On the client's loop."""
        setting = await self._prepare()
        versions = self._casting.versions(self._version, league=self._league)
        first = self.next_ordinal
        last = first + groups
        started = time.monotonic()
        played = await self._play(setting, range(first, last), versions)
        self.next_ordinal = last
        seconds = time.monotonic() - started
        batch = Batch(
            first // groups, self._casting.version(versions), tuple(played), seconds, self._meter.take()
        )
        if self._league:
            self._casting.record(batch)
        return batch

    def state(self) -> dict[str, Any]:
        """What a loop that resumes must know, as JSON values: the place in the data, late groups, the
        format of conversations, the pools of opponents.
        """
        pools = {agent: pool.state() for agent, pool in self._casting.pools.items()}
        state = {"next_ordinal": self.next_ordinal, "renderer": self._casting.renderer}
        late = self._playing.late
        return state | ({"pools": pools} if pools else {}) | ({"late": late} if late else {})

    async def _play(self, setting: Setting, ordinals: range, versions: Mapping[str, int]) -> list[Group]:
        """Groups in order, each begun when there are seats for it: what waits is a number, not a task."""

        def begin(ordinal: int, on_end: Callable[[], None]) -> GroupPlayer:
            play = Play(ordinal, self.task(ordinal), self._casting.cast(ordinal, versions))
            return GroupPlayer(setting, play, self._meter, on_end)

        async def play(player: GroupPlayer) -> Group:
            group = await player.play()
            # It is here, so the servers need not keep it.
            for sampler in {sampler for sampler, _ in player.requests}:
                sampler.acknowledge([name for asked, name in player.requests if asked is sampler])
            return group if self._keep else group.without_tokens()

        self._index += 1
        return await self._playing.batch(self._index, ordinals, begin, play)

    async def use(self, tasks: Sequence[Task]) -> None:
        """Play these tasks instead of the split's."""
        self._given = tasks
        await self._prepare()

    async def size(self) -> int | None:
        """How many tasks the split has; None where they are drawn from the seed."""
        await self._prepare()
        return None if self._tasks is None else len(self._tasks)

    def task(self, ordinal: int) -> Task:
        """The task with that ordinal; empty where the environment draws it from its seed."""
        if self._tasks is None:
            return {}
        epoch, place = divmod(ordinal, len(self._tasks))
        if self._shuffle:
            place = int(self._order(epoch, len(self._tasks))[place])
        try:
            return plain_json(self._tasks[place], "a task")
        except InvalidEpisodeData as error:
            raise errors.invalid(f"tasks[{place}]", str(error)) from None

    def _order(self, epoch: int, size: int) -> NDArray[np.int64]:
        """The order of an epoch, a pure function of the seed."""
        if self._shuffled is None or self._shuffled[0] != epoch:
            generator = np.random.default_rng(identity.seed(self._seed, "shuffle", epoch))
            self._shuffled = (epoch, generator.permutation(size))
        return self._shuffled[1]

    async def close(self) -> None:
        """End what is under way, and free the environment, if it was opened here."""
        await self._playing.close()
        if self._setting is not None and isinstance(self._env, str | type):
            await self._setting.source.close()

    async def _prepare(self) -> Setting:
        if self._setting is not None:
            return self._setting
        source = await self._open()
        self._tasks = self._given if self._given is not None else await source.tasks(self._split)
        if self._tasks is not None and not len(self._tasks):
            raise errors.invalid("split", f"{source.info.name} has no task in split {self._split!r}")
        check_loop(source.info, self._limits, self._policy.renderer)
        await self._casting.prepare(source.info)
        self._setting = Setting(
            source=source,
            params=self._params,
            limits=self._limits,
            group_size=self._group_size,
            seed=self._seed,
            scope=self._scope,
        )
        return self._setting

    async def _open(self) -> EnvironmentSource:
        if not isinstance(self._env, str | type):
            return self._env
        channel = await self._policy.cluster.env_channel() if isinstance(self._env, str) else None
        link = await self._policy.job.any_link()
        return await environment_source(self._env, self._options, channel=channel, job_token=link.token)


def rollouts(
    policy: "Policy",
    env: EnvironmentSpec | EnvironmentSource,
    *,
    groups: int,
    group_size: int,
    params: SamplingParams | None = None,
    limits: Limits | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    split: str = TRAIN,
    shuffle: bool = True,
    start: int = 0,
    version: int | None = None,
    scope: str | None = None,
    concurrency: int = MAX_EPISODES,
    agents: Mapping[str, Any] | None = None,
    stragglers: Stragglers | None = None,
) -> Rollouts:
    """Play `groups` groups of `group_size` episodes of one task each, again and again.

    `env` is an environment class (played in this process) or the name of a hosted one; `options` go to its
    `__init__`. `start` is the ordinal of the first task, for loops that resume; `version` pins a policy
    version; `scope` makes request ids reproducible (by default each call is its own); `concurrency` is how
    many episodes are played at once, though never less than a group. Where `params` cut unlikely tokens off,
    the trajectories carry what was kept (`SamplingParams.for_training`).

    `agents` says who plays the agents that the environment names, where that is not `policy`: another Policy,
    whose trajectories are recorded too, or an opponent, whose are not: `ot.Frozen`, `ot.OpponentPool`, or a
    function of the observation and a `random.Random` that gives a text or an Action. `stragglers`: what a
    batch does about groups that take long (`ot.WaitAll()`, `ot.MinViable()`).
    """
    return Rollouts(
        policy,
        env,
        groups=groups,
        group_size=group_size,
        params=params.for_training() if params is not None else None,
        limits=limits,
        seed=seed,
        options=options,
        split=split,
        shuffle=shuffle,
        start=start,
        version=version,
        scope=scope,
        concurrency=concurrency,
        agents=agents,
        stragglers=stragglers,
    )
