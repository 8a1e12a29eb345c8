"""Environments of Gymnasium's own classes that its registry lacks: masks, dictionaries, text, a crash."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Vault(gymnasium.Env[Any, Any]):
    """Turn three dials; a dial that was turned is masked. Opened in the right order it pays."""

    observation_space = spaces.Dict(
        {"dials": spaces.MultiBinary(3), "hint": spaces.Discrete(3), "action_mask": spaces.MultiBinary(3)}
    )
    action_space = spaces.Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.turned: list[int] = []
        self.order = [int(each) + 1 for each in self.np_random.permutation(3)]
        return self._see(), {"order": np.array(self.order), "at": np.float32(np.inf)}

    def step(self, action: Any) -> Any:
        assert action not in self.turned, "a masked action was stepped"
        self.turned.append(int(action))
        done = len(self.turned) == 3
        return self._see(), float(done and self.turned == self.order), done, False, {}

    def _see(self) -> Any:
        turned = np.array([place in self.turned for place in (1, 2, 3)], dtype=np.int8)
        return {"dials": turned, "hint": self.order[0] - 1, "action_mask": (1 - turned).astype(np.int8)}


class Echo(gymnasium.Env[str, str]):
    """Says back what it hears, backwards; stops at the second word."""

    observation_space = spaces.Text(64)
    action_space = spaces.Text(16)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abcdef"), 8))
        return f"Say {self.word} backwards.", {}

    def step(self, action: str) -> Any:
        return action[::-1], float(action == self.word[::-1]), True, False, {}


class Crashing(Echo):
    """Raises."""

    def step(self, action: str) -> Any:
        raise RuntimeError("the echo is gone")


class Aim(gymnasium.Env[Any, Any]):
    """Numbers in, numbers out: reach a point; cut after two shots."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Dict({"shot": spaces.Box(-1, 1, (2,), np.float32), "arm": spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.point = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.point, {}

    def step(self, action: Any) -> Any:
        distance = float(np.abs(action["shot"] - self.point).sum())
        return self.point, np.float32(-distance), distance < 0.1, False, {"arm": action["arm"]}


gymnasium.register("Vault-v0", Vault)
gymnasium.register("Echo-v0", Echo)
gymnasium.register("Crashing-v0", Crashing)
gymnasium.register("Aim-v0", Aim, max_episode_steps=2)
