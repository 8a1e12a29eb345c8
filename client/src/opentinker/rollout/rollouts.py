"""Batches of groups from a policy in an environment, one batch after the other.

    async for batch in rollouts(policy, env, groups=8, group_size=8): ...

Each batch is sampled at the version that the policy has when the batch begins. Tasks come in the order of
their ordinals; a static data set is shuffled anew each epoch, as a pure function of the seed.
"""

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from opentinker import errors
from opentinker.environments.base import Task
from opentinker.environments.sources import EnvironmentSource, EnvironmentSpec, environment_source
from opentinker.rollout.groups import GroupPlayer, Play, Setting
from opentinker.rollout.limits import Limits
from opentinker.rollout.renderer import Renderer
from opentinker.rollout.seats import MAX_EPISODES, Seats
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
    ) -> None:
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
        self._concurrency = concurrency
        self._keep = keep
        self._params = params or SamplingParams()
        self._params.check_tokens_only("sampling")
        self._limits = limits or Limits()
        self._seed = seed
        self._split = split
        self._shuffle = shuffle
        self._version = version
        self._scope = scope or uuid.uuid4().hex
        self._setting: Setting | None = None
        self._tasks: Sequence[Task] | None = None
        self._given: Sequence[Task] | None = None
        self.next_ordinal = start

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        return await self._policy.portal.bridge(self.next_batch(self._groups))

    async def next_batch(self, groups: int) -> Batch:
        """The next batch, with that many groups. On the client's loop."""
        setting = await self._prepare()
        version = self._policy.version if self._version is None else self._version
        first = self.next_ordinal
        last = first + groups
        meter = EngineMeter()
        started = time.monotonic()
        played = await self._play(setting, range(first, last), version, meter)
        self.next_ordinal = last
        return Batch(first // groups, version, tuple(played), time.monotonic() - started, meter.take())

    async def _play(
        self, setting: Setting, ordinals: Iterable[int], version: int, meter: EngineMeter
    ) -> list[Group]:
        """Groups in order, each begun when there are seats for it: what waits is a number, not a task."""
        seats = Seats(self._concurrency)
        playing: list[asyncio.Task[Group]] = []
        failed = asyncio.Event()

        async def play(player: GroupPlayer) -> Group:
            try:
                group = await player.play()
            except BaseException:
                failed.set()
                raise
            # It is here, so the servers need not keep it.
            self._policy.sampler.acknowledge(player.request_ids)
            return group if self._keep else group.without_tokens()

        try:
            for ordinal in ordinals:
                await seats.take(self._group_size)
                if failed.is_set():
                    break
                player = GroupPlayer(setting, Play(ordinal, self.task(ordinal), version), meter, seats.leave)
                playing.append(asyncio.ensure_future(play(player)))
            return list(await asyncio.gather(*playing))
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

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
        if not self._shuffle:
            return self._tasks[place]
        generator = np.random.default_rng(identity.seed(self._seed, "shuffle", epoch))
        return self._tasks[int(generator.permutation(len(self._tasks))[place])]

    async def close(self) -> None:
        """Free the environment, if it was opened here."""
        if self._setting is not None and isinstance(self._env, str | type):
            await self._setting.source.close()

    async def _prepare(self) -> Setting:
        if self._setting is not None:
            return self._setting
        source = await self._open()
        self._tasks = self._given if self._given is not None else await source.tasks(self._split)
        if self._tasks is not None and not len(self._tasks):
            raise errors.invalid("split", f"{source.info.name} has no task in split {self._split!r}")
        capabilities = await self._policy.sampler.capabilities()
        self._setting = Setting(
            sampler=self._policy.sampler,
            renderer=Renderer(await self._policy.tokenizer()),
            source=source,
            params=self._params,
            limits=self._limits,
            context_tokens=int(capabilities.context_tokens),
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
) -> Rollouts:
    """Play `groups` groups of `group_size` episodes of one task each, again and again.

    `env` is an environment class (played in this process) or the name of a hosted one; `options` go to its
    `__init__`. `start` is the ordinal of the first task, for loops that resume; `version` pins a policy
    version; `scope` makes request ids reproducible (by default each call is its own); `concurrency` is how
    many episodes are played at once, though never less than a group. Where `params` cut unlikely tokens off,
    the trajectories carry what was kept (`SamplingParams.for_training`).
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
    )
