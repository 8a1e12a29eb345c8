"""TextArena's games (extra `textarena`), for one player and for several.

    TicTacToe = textarena_environment("TicTacToe-v0", players=2)

The library draws from the process's generators and seeds them; here each episode has its own. It shows what a
player has not seen yet, since a conversation keeps the rest. Rewards exist only once a game is closed.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from opentinker.environments.adapters.libraries import library, plain
from opentinker.environments.adapters.randomness import OwnRandomness, library_seed
from opentinker.environments.agents import JointStep
from opentinker.environments.base import Environment
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.types import AGENT, Action, Observation, StepResult

Message = tuple[int, str, Any]
"""The library's: from whom (-1: the game), the text, its kind."""
Render = Callable[[int, list[Message]], str]
"""Of a player's number and what it has not seen yet."""


def textarena_environment(
    id: str,
    *,
    players: int = 1,
    render: Render | None = None,
    name: str = "",
    deterministic: bool = True,
    **options: Any,
) -> type[Environment]:
    """An environment class of a game. Its only player is the agent; several are `player_0`, `player_1`, …

    `options` and the environment's own go to `textarena.make`. A game that ended with a move is closed at
    once, for its rewards. What the rules refuse the game itself tells the player, and ends the game where
    it goes on.
    """
    textarena = library("textarena", "textarena")
    if id not in textarena.envs.registration.ENV_REGISTRY:
        raise EnvironmentDefinitionError(f"textarena_environment: there is no game {id!r}")
    names = (AGENT,) if players == 1 else tuple(f"player_{number}" for number in range(players))
    show = render or _shown

    def made(more: Mapping[str, Any]) -> Any:
        spec = textarena.envs.registration.ENV_REGISTRY[id]
        raw = f"{id}-raw" if f"{id}-raw" in textarena.envs.registration.ENV_REGISTRY else id
        env = textarena.make(raw, **{**options, **more})
        for wrapper in spec.default_wrappers or () if raw != id else ():
            # Those that repeat all that was said are left out; those that put actions right are not.
            if issubclass(wrapper, textarena.ActionWrapper):
                env = wrapper(env)
        return env

    with OwnRandomness(0)():
        try:
            made({}).reset(num_players=players, seed=0)
        except Exception as error:
            text = f"textarena_environment({id!r}, players={players}): {error}"
            raise EnvironmentDefinitionError(text) from error

    class TextArena(Environment):
        agents: ClassVar[tuple[str, ...]] = names

        def __init__(self, **more: Any) -> None:
            with OwnRandomness(0)():
                try:
                    self._env = made(more)
                except Exception as error:
                    raise InvalidOptions(f"options of {id}: {error}") from None

        def reset(self, *, seed: int, task: dict[str, Any]) -> Any:
            self._randomness = OwnRandomness(seed)
            with self._randomness():
                self._env.reset(num_players=players, seed=library_seed(seed))
                player, seen = self._next()
            return {names[player]: seen} if players > 1 else seen

        def step(self, said: Any) -> Any:
            action: Action = said if players == 1 else next(iter(said.values()))
            with self._randomness():
                done, info = self._env.step(action=action.text)
                if not done:
                    player, seen = self._next()
                    if players == 1:
                        return StepResult(seen, info=plain(info or {}))
                    return JointStep({names[player]: seen}, info=plain(info or {}))
                # Players who got nothing are not in it.
                rewards, told = self._env.close()
            given = {names[player]: value for player, value in (rewards or {}).items()}
            logged = {"players": plain(told)}
            if players == 1:
                return StepResult(reward=given.get(AGENT), terminated=True, info=logged)
            return JointStep(rewards=given, terminated=True, info=logged)

        def _next(self) -> tuple[int, Observation]:
            player, seen = self._env.get_observation()
            text = seen if isinstance(seen, str) else show(player, seen)
            return player, Observation(text or "It is your turn.")

    TextArena.deterministic = deterministic
    TextArena.__name__ = TextArena.__qualname__ = name or id
    TextArena.__doc__ = f"TextArena's {id}, for {players} player{'s' if players > 1 else ''}."
    return TextArena


def _shown(player: int, messages: list[Message]) -> str:
    """One below the other, with who said it; without what the player itself said."""
    lines = []
    for sender, text, _ in messages:
        if sender < 0:
            lines.append(text)
        elif sender != player:
            lines.append(f"Player {sender}: {text}")
    return "\n\n".join(line.strip() for line in lines)
