"""Gymnasium's environments (extra `gymnasium`), with observations in words and actions read from text.

Lake = gymnasium_environment("FrozenLake-v1", render="ansi", actions=("left", "down", "right", "up"))
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from opentinker.environments.adapters.libraries import is_rebuilt, library, plain
from opentinker.environments.adapters.randomness import library_seed
from opentinker.environments.adapters.spaces import (
    MASK,
    NoAction,
    Sayable,
    check_readable,
    check_sayable,
    in_words,
    kind,
)
from opentinker.environments.base import Environment
from opentinker.environments.content import Content, Message, Part
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.types import Action, Observation, StepResult

Shown = Content | Part | str | Sequence[str | Part]
Render = Callable[[Any, Mapping[str, Any]], Shown]
"""Of an observation and its info."""
Parse = Callable[[str, Any], Any]
"""Of what was said and the action space. A ValueError is told to the model."""


def gymnasium_environment(
    id: str,
    *,
    instructions: str = "",
    render: Render | str | None = None,
    parse: Parse | None = None,
    actions: Sequence[str] = (),
    name: str = "",
    deterministic: bool = True,
    **options: Any,
) -> type[Environment]:
    """An environment class of a registered id (or "module:id", which imports the module first).

    `options` and the environment's own go to `gymnasium.make`. `render` says what the model sees: a
    function of the observation and its info, or a `render_mode` that gives text ("ansi"); by default the
    observation space is put in words. `parse` reads actions: by default by the action space, where
    `actions` may name those of a Discrete one. A mask, as "action_mask" in the info or a Dict observation,
    makes the legal actions; others are told to the model and not stepped. `instructions` is the system
    message.
    """
    gymnasium = library("gymnasium", "gymnasium")
    mode = {"render_mode": render} if isinstance(render, str) else {}

    def made(more: Mapping[str, Any]) -> Any:
        return gymnasium.make(id, **{**options, **mode, **more})

    try:
        sample = made({})
    except Exception as error:
        raise EnvironmentDefinitionError(f"gymnasium_environment({id!r}): {error}") from error
    try:
        if render is None:
            check_readable(sample.observation_space)
        if parse is None:
            check_sayable(sample.action_space)
            Sayable(sample.action_space, actions)
        elif actions and kind(sample.action_space) != "Discrete":
            raise EnvironmentDefinitionError("actions: only a Discrete space has names")
    finally:
        sample.close()

    whole = not is_rebuilt(sample)

    class Gymnasium(Environment):
        copyable: ClassVar[bool] = whole

        def __init__(self, **more: Any) -> None:
            try:
                self._env = made(more)
            except Exception as error:
                raise InvalidOptions(f"options of {id}: {error}") from None
            discrete = kind(self._env.action_space) == "Discrete"
            self._actions = Sayable(self._env.action_space, actions) if discrete or parse is None else None

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            seed = library_seed(seed)
            # An action that is drawn from the space belongs to the episode too.
            self._env.action_space.seed(seed)
            seen, info = self._env.reset(seed=seed, **({"options": dict(task)} if task else {}))
            shown = self._observation(seen, info)
            if not instructions:
                return shown
            return Observation(
                messages=[Message("system", instructions), *shown.as_messages()],
                info=shown.info,
                legal_actions=shown.legal_actions,
            )

        def step(self, action: Action) -> StepResult:
            try:
                taken = self._read(action.text)
            except ValueError as refused:
                return StepResult(
                    Observation(str(refused), legal_actions=self._legal), info={"illegal_action": action.text}
                )
            seen, reward, terminated, truncated, info = self._env.step(taken)
            return StepResult(
                self._observation(seen, info, last=terminated or truncated),
                reward,
                terminated=terminated,
                truncated=truncated,
            )

        def close(self) -> None:
            self._env.close()

        def _read(self, text: str) -> Any:
            if parse is None:
                assert self._actions is not None
                return self._actions.read(text, self._mask)
            taken = parse(text, self._env.action_space)
            if not self._env.action_space.contains(taken):
                raise NoAction(f"That is no action: it must be one of {self._env.action_space}.")
            if self._mask is not None and not self._mask[int(taken) - int(self._env.action_space.start)]:
                raise NoAction("That is not allowed now.")
            return taken

        def _observation(self, seen: Any, info: Mapping[str, Any], last: bool = False) -> Observation:
            self._mask = mask_of(seen, info)
            self._legal = self._actions.legal(self._mask) if self._actions and not last else ()
            if isinstance(render, str):
                shown: Shown = str(self._env.render())
            elif render is not None:
                shown = render(seen, info)
            else:
                shown = in_words(self._env.observation_space, seen)
            logged = plain({key: value for key, value in info.items() if key != MASK})
            return Observation(shown, info=logged, legal_actions=self._legal)

    Gymnasium.deterministic = deterministic
    Gymnasium.__name__ = Gymnasium.__qualname__ = name or id
    Gymnasium.__doc__ = instructions or f"Gymnasium's {id}."
    return Gymnasium


def mask_of(seen: Any, info: Mapping[str, Any]) -> Any:
    """The mask of legal actions, where there is one."""
    if MASK in info:
        return info[MASK]
    return seen.get(MASK) if isinstance(seen, Mapping) else None
