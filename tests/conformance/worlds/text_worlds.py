"""Environments of text-game libraries that raise in their step, or that need a function of the user's."""

from typing import Any

import gem
import skyrl_gym
import textarena
from skyrl_gym.envs.base_text_env import BaseTextEnv

from opentinker.environments.adapters.gem import gem_environment
from opentinker.environments.adapters.reasoning_gym import reasoning_gym_environment
from opentinker.environments.adapters.skyrl_gym import skyrl_environment
from opentinker.environments.adapters.textarena import textarena_environment

ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"max_turns": 3},
}


class BadGame(textarena.Env):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed)
        self.state.reset(game_state={}, player_prompt_function=lambda player_id, game_state: "Go.")

    def step(self, action: str) -> Any:
        raise RuntimeError("the pieces are lost")


class BadGem(gem.Env):
    def reset(self, seed: int | None = None) -> Any:
        super().reset(seed)
        return "Go.", {}

    def step(self, action: str) -> Any:
        raise RuntimeError("the gem is cracked")


class BadText(BaseTextEnv):
    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> Any:
        raise RuntimeError("the gym is closed")


class Calculator(BaseTextEnv):
    """Adds with a tool of the library; what follows the first line of an action is cut off."""

    class Tools(skyrl_gym.tools.core.ToolGroup):
        def __init__(self) -> None:
            super().__init__("calculator")

        @skyrl_gym.tools.core.tool
        def add(self, a: str, b: str) -> str:
            return str(int(a) + int(b))

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.wanted = extras["reward_spec"]["ground_truth"]
        self.init_tool_groups([self.Tools()])

    def step(self, action: str) -> Any:
        self.turns += 1
        line = action.splitlines()[0]
        result = {"postprocessed_action": line, "metadata": {"turn": self.turns}, "observations": []}
        if line.startswith("add "):
            said = self._execute_tool("calculator", "add", line.split()[1:])
            return {
                **result,
                "observations": [{"role": "user", "content": said}],
                "reward": 0.0,
                "done": False,
            }
        return {**result, "reward": float(line == self.wanted), "done": True}

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns, "name": "calculator"}


def broken_answer(text: str) -> str:
    raise RuntimeError("no answer can be read")


textarena.register("BadGame-v0", "text_worlds:BadGame")
gem.register("bad:Gem-v0", "text_worlds:BadGem")
BadTextArena = textarena_environment("BadGame-v0")
BadGemEnv = gem_environment("bad:Gem-v0")
BadReasoning = reasoning_gym_environment("chain_sum", answer=broken_answer)
BadSkyRL = skyrl_environment("text_worlds:BadText", [ROW])
Maths = skyrl_environment("gsm8k_multi_turn", {"train": [ROW], "test": [ROW]})
Adding = skyrl_environment("text_worlds:Calculator", [ROW])
