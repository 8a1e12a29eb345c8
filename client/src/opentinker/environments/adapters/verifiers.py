"""Environments of the verifiers library (0.4, `verifiers.v1`), on the endpoint of a recorded episode.

    Sums = verifiers_environment({"taskset": {"id": "sums"}, "agent": {"runtime": {"type": "subprocess"}}})

The library pins packages that clash with others': host its environments in a virtual environment of their own
(`python` of a hosted environment).
"""

import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from opentinker.environments.base import Task
from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.loops import TOO_LONG, Endpoint, LoopEnvironment
from opentinker.environments.rewards import Reward, RewardStatus

Config = Mapping[str, Any] | Any
"""Its `[env]` block, or an EnvConfig of it."""


class RunFailed(Exception):
    """The library's run failed; `code` is OpenAI's where a limit refused a call of the model."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = TOO_LONG if TOO_LONG in text else None


def verifiers_environment(
    config: Config,
    *,
    test: Config | None = None,
    limit: int | None = None,
    name: str = "",
    run_timeout_s: float = 600.0,
) -> type[LoopEnvironment]:
    """An environment class of one of the library's: its `[env]` block, as a dict or EnvConfig, for the split
    "train", and `test` for the split "test" (the same taskset with other options, say).

    Tasks are those of the taskset, at most `limit` of them (needed where it has no end). The reward is the
    sum of the task's weighted rewards, each a component; its metrics are metrics. What the library records as
    an error is a fault of the environment, not a reward.

    Refused by name: more than one role, since one policy is recorded; a role with a model or client of its
    own; and retries, whose thrown away attempts would be trained on.
    """
    configs = {"train": _checked(config)} | ({"test": _checked(test)} if test is not None else {})
    loaded = {split: _loaded(each, split, limit) for split, each in configs.items()}
    timeout = run_timeout_s  # a class body does not see a name that it sets itself

    class Verifiers(LoopEnvironment):
        run_timeout_s: ClassVar[float] = timeout

        def __init__(self) -> None:
            self._numbers: dict[str, float] = {}

        async def run(self, *, endpoint: Endpoint, seed: int, task: dict[str, Any]) -> Reward:
            split, index = task["split"], task["index"]
            # The library takes keys from the environment only; one name for each episode.
            variable = f"OPENTINKER_EPISODE_{uuid.uuid4().hex}"
            os.environ[variable] = endpoint.api_key
            try:
                client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
                environment = load_environment(configs[split])
                async with environment.serving():
                    episode = await environment.run_episode(
                        loaded[split][index], vf.ModelContext(endpoint.model, client)
                    )
            finally:
                del os.environ[variable]
            return self._reward(episode)

        def _reward(self, episode: Any) -> Reward:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            if errors or not episode.ok:
                told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not ok"
                raise RunFailed(told)
            if len(episode.traces) != 1:
                raise RunFailed(f"its role ran {len(episode.traces)} times, and one run is recorded")
            (trace,) = episode.traces
            self._numbers = {key: value for key, value in trace.metrics.items() if value is not None}
            if any(value is None for value in trace.rewards.values()):
                return Reward.failed(RewardStatus.GRADER_ERROR)
            if not trace.rewards:
                return Reward.unscored()
            return Reward(trace.reward, components={key: each.value for key, each in trace.rewards.items()})

        def metrics(self) -> Mapping[str, float]:
            return self._numbers

        def tasks(self, split: str) -> Sequence[Task] | None:
            if split not in loaded:
                return None
            return [{"split": split, "index": index} for index in range(len(loaded[split]))]

    Verifiers.splits = tuple(configs)
    Verifiers.__name__ = Verifiers.__qualname__ = name or configs["train"].env_id.replace("/", "_")
    Verifiers.__doc__ = f"The verifiers environment {configs['train'].env_id}."
    return Verifiers


def _checked(config: Config) -> Any:
    """The library's configuration. EnvironmentDefinitionError for what could not be trained on."""
    resolved = resolve_env_config(config if isinstance(config, vf.EnvConfig) else dict(config))
    roles = agent_config_fields(resolved)
    if len(roles) != 1:
        raise EnvironmentDefinitionError(
            f"{resolved.env_id} has the roles {', '.join(roles)}: one can be trained"
        )
    ((name, role),) = roles.items()
    for field in ("model", "client"):
        if getattr(role, field) is not None:
            raise EnvironmentDefinitionError(f"{name}.{field}: the policy plays this role")
    for where, retries in (("retries", resolved.retries), (f"{name}.retries", role.retries)):
        if retries.max_retries or any(rule.max_retries for rule in retries.rules):
            text = "what an attempt that is thrown away said would be trained on; leave them out"
            raise EnvironmentDefinitionError(f"{where}: {text}")
    return resolved


def _loaded(config: Any, split: str, limit: int | None) -> list[Any]:
    taskset = load_environment(config).taskset
    if limit is None and not taskset.bounded:
        raise EnvironmentDefinitionError(f"limit: the taskset {config.taskset.id} has no end; say how many")
    tasks = list(itertools.islice(taskset, limit))
    if not tasks:
        raise EnvironmentDefinitionError(f"the taskset of {split!r}, {config.taskset.id}, is empty")
    return tasks
