"""A reward function over a list of tasks, and one that kills its episode."""

from typing import Any, ClassVar

import opentinker as ot

TASKS = {
    "train": [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 4 =", "answer": "7"}],
    "test": [{"prompt": "1 + 1 =", "answer": "2"}],
}


def reward(completion: str, task: dict[str, Any]) -> float | None:
    """One for the right number."""
    return None if completion == "pass" else float(completion.strip() == task["answer"])


async def reward_later(completion: str, task: dict[str, Any]) -> float | None:
    """The same, waited for."""
    return reward(completion, task)


Sums = ot.single_turn(TASKS, reward=reward, name="sums")
SumsLater = ot.single_turn(TASKS, reward=reward_later, name="sums_later")


class Crashing(ot.single_turn(TASKS, reward=reward)):  # type: ignore[misc]
    """Raises outside its grader."""

    max_turns: ClassVar[int] = 1

    def step(self, action: ot.Action) -> ot.StepResult:
        raise RuntimeError("the abacus broke")
