"""An environment whose agent runs code, for tests of the host."""

from typing import Any

from opentinker.environments import Action, Environment, Observation, StepResult
from opentinker.sandbox import CodeInterpreter


class Coder(Environment):
    """Runs what it is told; "end" ends it."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self.python = CodeInterpreter()
        return Observation("Write code.")

    def step(self, action: Action) -> StepResult:
        if action.text == "end":
            return StepResult(reward=1.0, terminated=True)
        return StepResult(self.python.call({"code": action.text}))

    def close(self) -> None:
        self.python.close()
