"""GEM's environments (extra `gem`).

    Guess = gem_environment("game:GuessTheNumber-v0", max_number=50)

The library draws from the process's generators and seeds them; here each episode has its own.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentinker.environments.adapters.libraries import library, plain
from opentinker.environments.adapters.randomness import OwnRandomness, library_seed
from opentinker.environments.base import Environment
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.types import Action, Observation, StepResult


def gem_environment(
    id: str, *, name: str = "", deterministic: bool = True, **options: Any
) -> type[Environment]:
    """An environment class of a registered id. `options` and the environment's own go to `gem.make`.

    The model sees an observation between the "prefix" and "suffix" of its info, as GEM's own wrappers show
    it; the conversation keeps what came before.
    """
    with _logging_as_it_was():
        gem = library("gem", "gem")

    def made(more: Mapping[str, Any]) -> Any:
        return gem.make(id, **{**options, **more})

    with OwnRandomness(0)():
        try:
            made({})
        except Exception as error:
            raise EnvironmentDefinitionError(f"gem_environment({id!r}): {error}") from error

    class Gem(Environment):
        def __init__(self, **more: Any) -> None:
            with OwnRandomness(0)():
                try:
                    self._env = made(more)
                except Exception as error:
                    raise InvalidOptions(f"options of {id}: {error}") from None

        def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
            self._randomness = OwnRandomness(seed)
            with self._randomness():
                seen, info = self._env.reset(seed=library_seed(seed))
            return _shown(seen, info)

        def step(self, action: Action) -> StepResult:
            with self._randomness():
                seen, reward, terminated, truncated, info = self._env.step(action.text)
            over = terminated or truncated
            return StepResult(
                Observation(seen, info=plain(info)) if over else _shown(seen, info),
                # It gives both where a limit of its own rules ends the game.
                reward,
                terminated=terminated,
                truncated=truncated,
            )

    Gem.deterministic = deterministic
    Gem.__name__ = Gem.__qualname__ = name or id
    Gem.__doc__ = f"GEM's {id}."
    return Gem


@contextmanager
def _logging_as_it_was() -> Iterator[None]:
    """The library sets up the root logger when it is imported, which is not its to decide here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _shown(seen: str, info: Mapping[str, Any]) -> Observation:
    parts = (info.get("prefix", ""), seen, info.get("suffix", ""))
    return Observation("\n".join(part.strip("\n") for part in parts if part), info=plain(info))
