"""Train an agent that may run Python before it answers: several turns, code in a jail, one call of `fit()`.

python examples/maths_with_python.py

Needs bubblewrap (`apt-get install bubblewrap`); without it no code runs and the example says so.
"""

import argparse
import random
import re
from typing import Any

import opentinker as ot

TASK = (
    "Find the sum of the multiples of {step} from 1 to {last}. You may run code in a ```python block and see \
what it prints. End with a line 'Answer: <number>'."
)


class MathsWithPython(ot.Environment):
    """A sum that a program finds more easily than a head."""

    max_turns = 4

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        draw = random.Random(seed)
        step, last = draw.randint(3, 9), draw.randint(20, 200)
        self.answer = str(sum(range(step, last + 1, step)))
        self.turns = 0
        self.python = ot.sandbox.CodeInterpreter(limits=ot.sandbox.Limits(wall_s=5))
        return ot.Observation(TASK.format(step=step, last=last))

    def step(self, action: ot.Action) -> ot.StepResult:
        self.turns += 1
        answer = re.search(r"^answer: *(-?\d+)", action.text, re.I | re.M)
        if answer or self.turns == self.max_turns:
            return ot.StepResult(reward=float(bool(answer) and answer[1] == self.answer), terminated=True)
        return ot.StepResult(self.python.observe(action) or "Run code in a ```python block, or answer.")

    def metrics(self) -> dict[str, float]:
        return {"code_runs": float(self.python.calls)}

    def close(self) -> None:
        self.python.close()


def main() -> None:
    """Evaluate, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 episodes in each step")
    parser.add_argument("--episodes", type=int, default=50, help="how many to play after training")
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    arguments = parser.parse_args()
    with ot.connect():
        result = ot.fit(
            env=MathsWithPython,
            model=arguments.model,
            tuning=ot.LoRA(rank=16),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            sampling=ot.SamplingParams(max_tokens=160),
            inference=ot.ServerOptions(engine=arguments.engine),
        )
        played = ot.run(result.policy, MathsWithPython, episodes=arguments.episodes)
    print(f"right in {played.reward:.0%} of {played.episodes} episodes")


if __name__ == "__main__":
    main()
