"""PettingZoo's environments of several agents (extra `pettingzoo`): where they take turns (AEC), and where
they move at once (parallel).

    TicTacToe = pettingzoo_environment("classic/tictactoe_v3", render=board)
    Rps = pettingzoo_environment("classic/rps_v2", parallel=True, actions=("rock", "paper", "scissors"))
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from opentinker.environments.adapters.gymnasium import Shown, mask_of
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
from opentinker.environments.agents import JointStep
from opentinker.environments.base import Environment
from opentinker.environments.content import Message
from opentinker.environments.errors import EnvironmentDefinitionError, InvalidOptions
from opentinker.environments.types import Action, EndReason, Observation

Render = Callable[[str, Any, Mapping[str, Any]], Shown]
"""Of an agent's name, its observation and its info."""
Parse = Callable[[str, str, Any], Any]
"""Of an agent's name, what it said and its action space. A ValueError is told to it."""


def pettingzoo_environment(
    make: Callable[..., Any] | str,
    *,
    parallel: bool = False,
    instructions: str = "",
    render: Render | None = None,
    parse: Parse | None = None,
    actions: Sequence[str] = (),
    name: str = "",
    deterministic: bool = True,
    **options: Any,
) -> type[Environment]:
    """An environment class of an id of PettingZoo's registry, of a module of its kind (with `env` and
    `parallel_env`), or of a function that makes an AEC environment, or with `parallel` a parallel one.

    `options` and the environment's own are that function's. Its `possible_agents` are the agents. `render`,
    `parse`, `actions`, masks and `instructions` (which each agent gets) are as in `gymnasium_environment`, of
    each agent's spaces. Who makes an illegal move is told and asked again; in a parallel environment the
    moves of the others wait for it.

    Each agent gets what the library gave it since the last turn, one that is out too. An agent for whom it is
    over has its own end.
    """
    function = _function(library("pettingzoo", "pettingzoo"), make, parallel)

    def made(more: Mapping[str, Any]) -> Any:
        return function(**{**options, **more})

    try:
        sample = made({})
    except Exception as error:
        raise EnvironmentDefinitionError(f"pettingzoo_environment({make!r}): {error}") from error
    try:
        names = _check(sample, render, parse, actions, parallel)
    finally:
        sample.close()

    whole = not is_rebuilt(sample)

    class PettingZoo(Environment):
        copyable: ClassVar[bool] = whole
        agents: ClassVar[tuple[str, ...]] = names

        def __init__(self, **more: Any) -> None:
            try:
                self._env = made(more)
            except Exception as error:
                raise InvalidOptions(f"options of {make}: {error}") from None
            self._sayable = {
                agent: Sayable(self._env.action_space(agent), actions)
                for agent in names
                if parse is None or kind(self._env.action_space(agent)) == "Discrete"
            }
            self._game: _Turns | _AtOnce = _AtOnce(self._env) if parallel else _Turns(self._env)
            self._told: set[str] = set()
            self._held: dict[str, Any] = {}

        def reset(self, *, seed: int, task: dict[str, Any]) -> dict[str, Observation]:
            seed = library_seed(seed)
            for place, agent in enumerate(names):
                self._env.action_space(agent).seed(seed + place)
            self._game.reset(seed, task)
            return {agent: self._observation(agent) for agent in self._game.pending}

        def step(self, said: Mapping[str, Action]) -> JointStep:
            refused: dict[str, str] = {}
            for agent, action in said.items():
                try:
                    self._held[agent] = self._read(agent, action.text)
                except ValueError as error:
                    refused[agent] = str(error)
            if refused:
                again = {agent: self._refusal(agent, text) for agent, text in refused.items()}
                return JointStep(again, info={"illegal_actions": sorted(refused)})
            moves, self._held = self._held, {}
            rewards, ended = self._game.move(moves)
            over = not self._game.pending
            return JointStep(
                {} if over else {agent: self._observation(agent) for agent in self._game.pending},
                rewards,
                terminated=over and not self._game.only_cut,
                truncated=over and self._game.only_cut,
                ended=ended,
            )

        def close(self) -> None:
            self._env.close()

        def _read(self, agent: str, text: str) -> Any:
            _, _, mask = self._seen(agent)
            if parse is None:
                return self._sayable[agent].read(text, mask)
            space = self._env.action_space(agent)
            move = parse(agent, text, space)
            if not space.contains(move):
                raise NoAction(f"That is no action: it must be one of {space}.")
            if mask is not None and not mask[int(move) - int(space.start)]:
                raise NoAction("That is not allowed now.")
            return move

        def _seen(self, agent: str) -> tuple[Any, Mapping[str, Any], Any]:
            seen, info = self._game.pending[agent]
            return seen, info, mask_of(seen, info)

        def _legal(self, agent: str) -> tuple[str, ...]:
            sayable = self._sayable.get(agent)
            return sayable.legal(self._seen(agent)[2]) if sayable else ()

        def _refusal(self, agent: str, text: str) -> Observation:
            return Observation(text, legal_actions=self._legal(agent))

        def _observation(self, agent: str) -> Observation:
            seen, info, _ = self._seen(agent)
            space = self._env.observation_space(agent)
            shown = in_words(space, seen) if render is None else render(agent, seen, info)
            logged = plain({key: value for key, value in info.items() if key != MASK})
            observation = Observation(shown, info=logged, legal_actions=self._legal(agent))
            if agent in self._told or not instructions:
                return observation
            self._told.add(agent)
            return Observation(
                messages=[Message("system", instructions), *observation.as_messages()],
                info=logged,
                legal_actions=observation.legal_actions,
            )

    PettingZoo.deterministic = deterministic
    PettingZoo.__name__ = PettingZoo.__qualname__ = name or (
        make.rpartition(".")[2] if isinstance(make, str) else getattr(make, "__name__", "pettingzoo")
    )
    PettingZoo.__doc__ = instructions or f"PettingZoo's {PettingZoo.__name__}."
    return PettingZoo


class _Turns:
    """An AEC environment. `pending` is the agent whose move it is, with what it sees."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.pending: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        self.only_cut = True
        """Every agent that is out was cut."""

    def reset(self, seed: int, task: Mapping[str, Any]) -> None:
        self._env.reset(seed=seed, **({"options": dict(task)} if task else {}))
        self._bury({})

    def move(self, moves: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, EndReason]]:
        ((mover, action),) = moves.items()
        # What has piled up for each since its own last move; the mover's begins anew with this one.
        before = {name: float(value) for name, value in self._env._cumulative_rewards.items()}
        before[mover] = 0.0
        self._env.step(action)
        after = self._env._cumulative_rewards
        rewards = {name: float(after[name]) - before.get(name, 0.0) for name in self._env.agents}
        ended: dict[str, EndReason] = {}
        self._bury(ended)
        return rewards, ended

    def _bury(self, ended: dict[str, EndReason]) -> None:
        """Pass the turns of those who are out, until it is the turn of one who is not. Rewards were read
        before: afterwards the library has forgotten them.
        """
        self.pending = {}
        while self._env.agents:
            agent = self._env.agent_selection
            seen, _, terminated, truncated, info = self._env.last()
            if not (terminated or truncated):
                self.pending = {agent: (seen, info)}
                return
            ended[agent] = EndReason.TERMINATED if terminated else EndReason.TRUNCATED
            self.only_cut &= not terminated
            self._env.step(None)


class _AtOnce:
    """A parallel environment. `pending` are all who are not out."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.pending: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        self.only_cut = True

    def reset(self, seed: int, task: Mapping[str, Any]) -> None:
        seen, infos = self._env.reset(seed=seed, **({"options": dict(task)} if task else {}))
        self.pending = {agent: (seen[agent], infos.get(agent, {})) for agent in self._env.agents}

    def move(self, moves: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, EndReason]]:
        seen, rewards, terminated, truncated, infos = self._env.step(dict(moves))
        ended = {}
        for agent in moves:
            if terminated.get(agent) or truncated.get(agent):
                ended[agent] = EndReason.TERMINATED if terminated.get(agent) else EndReason.TRUNCATED
                self.only_cut &= not terminated.get(agent)
        self.pending = {agent: (seen[agent], infos.get(agent, {})) for agent in self._env.agents}
        return {agent: float(value) for agent, value in rewards.items()}, ended


def _function(pettingzoo: Any, make: Callable[..., Any] | str, parallel: bool) -> Callable[..., Any]:
    if not isinstance(make, str):
        return make
    if "/" in make:
        kind_of = "parallel" if parallel else "aec"
        return lambda **options: pettingzoo.make(kind_of, make, **options)
    wanted = "parallel_env" if parallel else "env"
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(make), wanted)
    except (ImportError, AttributeError) as error:
        raise EnvironmentDefinitionError(
            f"pettingzoo_environment: {make!r} has no {wanted}: {error}"
        ) from error
    return function


def _check(env: Any, render: Any, parse: Any, actions: Sequence[str], parallel: bool) -> tuple[str, ...]:
    """The names of its agents. EnvironmentDefinitionError."""
    if hasattr(env, "last") is parallel:
        wrong = "takes turns" if parallel else "is parallel"
        raise EnvironmentDefinitionError(
            f"pettingzoo_environment: {env} {wrong}; pass parallel={not parallel}"
        )
    names = tuple(str(name) for name in env.possible_agents)
    for name in names:
        if render is None:
            check_readable(env.observation_space(name), f"observation_space({name!r})")
        if parse is None:
            check_sayable(env.action_space(name), f"action_space({name!r})")
            Sayable(env.action_space(name), actions)
    return names
