"""A game of OpenTinker's research code: it draws from the generators of the process, as those games do."""

import random
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepResult:
    observation: str
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class Dice:
    """Reach the target by rolling, or lose what you have."""

    def __init__(self, sides: int = 6) -> None:
        self._sides = sides

    def generate_initial_state(self) -> dict[str, Any]:
        return {"target": random.randint(10, 1000)}

    def reset(self, target: int = 20, **_: Any) -> str:
        self._target, self._sum = target, 0
        return f"Target {target}."

    def step(self, action: str) -> StepResult:
        if action == "crash":
            raise RuntimeError("the dice fell off the table")
        if action == "hold":
            return StepResult("You hold.", self._sum / 100, True, {"sum": {self._sum}})
        self._sum += random.randint(1, self._sides)
        return StepResult(f"You have {self._sum}.", 0.25, False)

    def get_system_prompt(self) -> str:
        return "You roll dice."

    def get_initial_user_message(self) -> str:
        return "Say roll or hold."
