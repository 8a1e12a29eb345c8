"""Where episodes come from: a class played in this process, or a name played on env_host."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import grpc.aio

from opentinker.environments.base import (
    EnvironmentClass,
    EnvironmentInfo,
    Task,
    describe,
    make,
)
from opentinker.environments.content import plain_json
from opentinker.environments.session import EnvironmentSession, LocalSession, typed_error
from opentinkerapi.runtime.reasons import Reason

EnvironmentSpec = EnvironmentClass | str
"""A class, or the name of a hosted environment ("guess_number" or "hosted:guess_number")."""

STEP_TIMEOUT_S = 30.0
"""Of a step, unless told otherwise; where the environment owns the loop its own `run_timeout_s` counts."""
HOSTED_PREFIX = "hosted:"


class EnvironmentSource(Protocol):
    """Opens episodes of one environment with fixed options."""

    @property
    def info(self) -> EnvironmentInfo:
        """What the environment says about itself."""
        ...

    async def tasks(self, split: str) -> Sequence[Task] | None:
        """The tasks of a split; None where `reset` draws them from the seed."""
        ...

    async def open_group(
        self, *, task: Mapping[str, Any], seed: int, size: int, request_id: str = ""
    ) -> tuple[EnvironmentSession, ...]:
        """Open `size` episodes of one task with one environment seed, without beginning them."""
        ...

    async def close(self) -> None:
        """Free everything that is open."""
        ...


class LocalEnvironment:
    """A source of episodes played in this process."""

    def __init__(
        self,
        cls: EnvironmentClass,
        options: Mapping[str, Any] | None = None,
        *,
        step_timeout_s: float | None = None,
    ) -> None:
        self.info = describe(cls)
        self._options = dict(options or {})
        _try_options(cls, self._options)
        self._cls = cls
        self._step_timeout_s = _timeout(step_timeout_s, self.info)

    async def tasks(self, split: str) -> Sequence[Task] | None:
        if split not in self.info.splits:
            return None
        environment = make(self._cls, self._options)
        return await asyncio.to_thread(environment.tasks, split)

    async def open_group(
        self, *, task: Mapping[str, Any], seed: int, size: int, request_id: str = ""
    ) -> tuple[EnvironmentSession, ...]:
        group = uuid.uuid4().hex[:12]
        plain = plain_json(task, "task")
        return tuple(
            LocalSession(
                self._cls,
                seed=seed,
                task=plain,
                options=self._options,
                step_timeout_s=self._step_timeout_s,
                episode=f"episodes/local-{group}-{member}",
            )
            for member in range(size)
        )

    async def close(self) -> None:
        """Nothing outlives the sessions here."""


def _try_options(cls: EnvironmentClass, options: Mapping[str, Any]) -> None:
    """InvalidArgument, as a host would answer, if the environment does not take the options."""
    try:
        make(cls, options)
    except ValueError as error:
        raise typed_error(Reason.INVALID_FIELD, str(error), field="env_options") from error


async def environment_source(
    env: EnvironmentSpec,
    options: Mapping[str, Any] | None = None,
    *,
    channel: grpc.aio.Channel | None = None,
    job_token: str | Callable[[], str] = "",
    step_timeout_s: float | None = None,
) -> EnvironmentSource:
    """The source for what a user passed as `env`.

    A class is played here; a string names an environment of the env_host behind `channel`, where episodes are
    the job's whose token is given, or asked for anew for each call. Raises
    EnvironmentDefinitionError for a class that cannot be played, InvalidArgument for options,
    UnknownEnvironment (listing what is hosted) for a name.
    """
    if not isinstance(env, str):
        return LocalEnvironment(env, options, step_timeout_s=step_timeout_s)
    name = env.removeprefix(HOSTED_PREFIX)
    if channel is None:
        raise typed_error(
            Reason.UNKNOWN_ENVIRONMENT,
            f"{env!r} names a hosted environment, and this cluster has no env_host; pass the class instead",
            field="env",
        )
    # Only here: playing a class needs none of the host's messages, and they take a while to load.
    from opentinker.environments.hosted import HostedEnvironment, list_hosted

    hosted = await list_hosted(channel)
    if name not in hosted and "@" not in name:
        # The newest version now, and no other later: what is played again must be the same code.
        versions = [each for each in hosted if each.rpartition("@")[0] == name]
        name = max(versions, key=lambda each: int(each.rpartition("@")[2]), default=name)
    if name not in hosted:
        raise typed_error(
            Reason.UNKNOWN_ENVIRONMENT,
            f"no environment {name!r} is hosted here; known: {', '.join(sorted(hosted)) or 'none'}",
            field="env",
        )
    info = hosted[name]
    return HostedEnvironment(
        channel, info, options or {}, step_timeout_s=_timeout(step_timeout_s, info), job_token=job_token
    )


def _timeout(given: float | None, info: EnvironmentInfo) -> float:
    return given or info.run_timeout_s or STEP_TIMEOUT_S
