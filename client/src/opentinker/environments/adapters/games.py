"""Games written for OpenTinker's research code: a class with `reset`, `step`, `get_system_prompt` and
`get_initial_user_message`, and `generate_initial_state` where it draws its own problems.

    Gomoku = game_environment(GomokuGame)

Nothing of that code is needed: the methods are what counts.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentinker.environments.adapters.libraries import named_class, plain
from opentinker.environments.adapters.randomness import OwnRandomness
from opentinker.environments.base import Environment, Task
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidEpisodeData, InvalidOptions
from opentinker.environments.types import Action, Observation, StepResult

if TYPE_CHECKING:
    from opentinker.environments.rows import Source

_METHODS = ("reset", "step", "get_system_prompt", "get_initial_user_message")
_RESULT = ("observation", "reward", "done")


def game_environment(
    game: Callable[..., Any] | str,
    tasks: "Source | Mapping[str, Source] | None" = None,
    *,
    name: str = "",
    deterministic: bool = True,
    **options: Any,
) -> type[Environment]:
    """An environment class of such a game: a class, or "module:Class" for targets of env_host.

    `options` and the environment's own go to its constructor. `reset` gets the task as keyword arguments,
    or where there are no tasks, what `generate_initial_state` draws from the episode's seed. The first
    observation is the system prompt, and the user message with what `reset` said below it. What a game
    draws from the generators of `random` and `numpy.random` is the episode's own.
    """
    make = named_class(game, "game_environment")
    if missing := [each for each in _METHODS if not callable(getattr(make, each, None))]:
        raise EnvironmentDefinitionError(f"game_environment: {make!r} has no {' and no '.join(missing)}")
    splits = _splits(tasks)

    class Game(Environment):
        def __init__(self, **more: Any) -> None:
            try:
                inspect.signature(make).bind(**{**options, **more})
            except TypeError as error:
                raise InvalidOptions(f"options of {make.__name__}: {error}") from None
            self._options = {**options, **more}

        def tasks(self, split: str) -> Sequence[Task] | None:
            return splits.get(split)

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._randomness = OwnRandomness(seed)
            with self._randomness():
                self._game = make(**self._options)
                state = task or _generated(self._game)
                said = self._game.reset(**state)
                system, user = self._game.get_system_prompt(), self._game.get_initial_user_message()
            messages = [{"role": "user", "content": "\n\n".join(filter(None, (user, said)))}]
            if system:
                messages.insert(0, {"role": "system", "content": system})
            return Observation(messages=messages)

        def step(self, action: Action) -> StepResult:
            with self._randomness():
                result = self._game.step(action.text)
            if missing := [each for each in _RESULT if not hasattr(result, each)]:
                raise InvalidEpisodeData(f"the result of a step has no {' and no '.join(missing)}")
            return StepResult(
                str(result.observation),
                result.reward,
                terminated=bool(result.done),
                info=plain(getattr(result, "info", None) or {}),
            )

        def close(self) -> None:
            close = getattr(getattr(self, "_game", None), "close", None)
            if close is not None:
                close()

    Game.splits = tuple(splits)
    Game.deterministic = deterministic
    Game.__name__ = Game.__qualname__ = name or getattr(make, "__name__", "game")
    Game.__doc__ = inspect.getdoc(make) or "A game."
    return Game


def _generated(game: Any) -> dict[str, Any]:
    generate = getattr(game, "generate_initial_state", None)
    return {} if generate is None else dict(generate())


def _splits(tasks: Any) -> dict[str, Sequence[Task]]:
    if tasks is None:
        return {}
    # Only here: reading data needs the client's errors.
    from opentinker.environments.tasks import tasks as read

    given = dict(tasks) if isinstance(tasks, Mapping) else {"train": tasks}
    return {split: read(rows, name=split) for split, rows in given.items()}
