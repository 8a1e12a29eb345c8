"""Environments of PettingZoo's own classes: agents that are out early, rewards of others' moves, a crash."""

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import AgentSelector


class Last(AECEnv[str, Any, Any]):
    """Three in turn name a number from 0 to 2; who says 0 is out at once and pays 1 to each of the others.
    The last one in gets 5.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "last_v0"}

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["red", "green", "blue"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict({"in": spaces.Discrete(4), "luck": spaces.Discrete(1000)})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.luck = int(np.random.default_rng(seed).integers(1000))
        self.agents = self.possible_agents[:]
        for name in ("rewards", "_cumulative_rewards"):
            setattr(self, name, dict.fromkeys(self.agents, 0.0))
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {name: {} for name in self.agents}
        self._order = AgentSelector(self.agents)
        self.agent_selection = self._order.reset()

    def observe(self, agent: str) -> Any:
        return {"in": len(self._left()), "luck": self.luck}

    def _left(self) -> list[str]:
        return [name for name in self.agents if not (self.terminations[name] or self.truncations[name])]

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            self._was_dead_step(action)
            return
        if action == 1:
            raise RuntimeError("one is an unlucky number")
        self._cumulative_rewards[mover] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if action == 0:
            self.truncations[mover] = True
            others = self._left()
            self.rewards[mover] = -float(len(others))
            self.rewards.update(dict.fromkeys(others, 1.0))
            if len(others) == 1:
                self.rewards[others[0]] += 5.0
                self.terminations[others[0]] = True
        self._accumulate_rewards()
        self.agent_selection = self._next(mover)
        self.agent_selection = self._deads_step_first()

    def _next(self, mover: str) -> str:
        place = self.possible_agents.index(mover)
        for step in (1, 2, 3):
            name = self.possible_agents[(place + step) % 3]
            if name in self.agents:
                return name
        return mover


def env(**options: Any) -> Last:
    return Last(**options)


class Race(ParallelEnv[str, Any, Any]):
    """Two move at once; who reaches 3 is out with 1, the other goes on until the third round ends."""

    metadata: ClassVar[dict[str, Any]] = {"name": "race_v0"}

    def __init__(self) -> None:
        self.possible_agents = ["hare", "tortoise"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = self.possible_agents[:]
        self.wind = float(np.random.default_rng(seed).integers(100))
        self.at = dict.fromkeys(self.agents, 0)
        self.round = 0
        return self._see(), {name: {} for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        self.round += 1
        for name, action in actions.items():
            self.at[name] += int(action)
        there = {name: self.at[name] >= 3 for name in self.agents}
        cut = {name: self.round == 3 and not there[name] for name in self.agents}
        rewards = {name: float(there[name]) for name in self.agents}
        seen = self._see()
        self.agents = [name for name in self.agents if not (there[name] or cut[name])]
        return seen, rewards, there, cut, {name: {} for name in there}

    def _see(self) -> Any:
        return {name: np.array([self.at[name], self.wind], np.float32) for name in self.agents}


def parallel_env(**options: Any) -> Race:
    return Race(**options)
