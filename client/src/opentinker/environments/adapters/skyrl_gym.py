"""skyrl-gym's text environments (extra `skyrl-gym`), with the rows of their data sets as tasks.

    Maths = skyrl_environment("gsm8k_multi_turn", {"train": "train.parquet", "test": "test.parquet"})

Their tools run inside `step`, as their authors wrote them: the library's Python tool in no jail.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentinker.environments.adapters.libraries import library, named_class, plain
from opentinker.environments.adapters.randomness import OwnRandomness
from opentinker.environments.base import Environment, Task
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source


def skyrl_environment(
    env: str,
    tasks: "Source | Mapping[str, Source]",
    *,
    max_turns: int = 0,
    env_config: Mapping[str, Any] | None = None,
    name: str = "",
    deterministic: bool = True,
) -> type[Environment]:
    """An environment class of a registered id, or of "module:Class" of one that is not registered.

    A row's "prompt" is its list of messages and goes to `init`; the others are the environment's `extras`,
    with `max_turns` where it is given. What an environment makes of an action (`postprocessed_action`) is
    in the info: training is on what was sampled. `get_metrics` gives the numbers for the logs.
    """
    skyrl_gym = library("skyrl_gym", "skyrl-gym")
    cls: Any = None
    if env not in skyrl_gym.registry:
        if ":" not in env:
            known = ", ".join(sorted(skyrl_gym.registry))
            raise EnvironmentDefinitionError(f"skyrl_environment: there is no {env!r}; known: {known}")
        cls = named_class(env, "skyrl_environment")
    # Only here: reading data needs the client's errors.
    from opentinker.environments.tasks import tasks as read

    given = dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    splits = {split: read(rows, name=split) for split, rows in given.items()}

    def made(extras: dict[str, Any]) -> Any:
        arguments = {"env_config": copy.deepcopy(dict(env_config or {})), "extras": extras}
        return cls(**arguments) if cls is not None else skyrl_gym.make(env, **arguments)

    class SkyRL(Environment):
        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            prompt = task.get("prompt")
            if not isinstance(prompt, list):
                raise InvalidEpisodeData(f"task: prompt must be a list of messages, not {prompt!r}")
            extras = {key: value for key, value in task.items() if key != "prompt"}
            if max_turns:
                extras["max_turns"] = max_turns
            self._randomness = OwnRandomness(seed)
            with self._randomness():
                self._env = made(extras)
                messages, info = self._env.init(prompt)
            return Observation(messages=messages, info=plain(info or {}))

        def step(self, action: Action) -> StepResult:
            with self._randomness():
                output = self._env.step(action.text)
            info = dict(plain(output.get("metadata") or {}))
            if output.get("postprocessed_action") not in (None, action.text):
                info["postprocessed_action"] = output["postprocessed_action"]
            messages = output["observations"]
            return StepResult(
                Observation(messages=messages) if messages else None,
                output["reward"],
                terminated=bool(output["done"]),
                info=info,
            )

        def metrics(self) -> dict[str, float]:
            with self._randomness():
                numbers = self._env.get_metrics()
            return {
                name: value
                for name, value in plain(numbers).items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }

        def close(self) -> None:
            if hasattr(self, "_env"):
                self._env.close()

    SkyRL.splits = tuple(splits)
    SkyRL.deterministic = deterministic
    SkyRL.__name__ = SkyRL.__qualname__ = name or env.rpartition(":")[2]
    SkyRL.__doc__ = (inspect.getdoc(cls) if cls else None) or f"skyrl-gym's {SkyRL.__name__}."
    return SkyRL
