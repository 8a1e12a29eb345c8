"""Train an agent that calls Python before it answers: several turns, a tool, code in a jail.

    python examples/maths_with_python.py

Needs bubblewrap (`apt-get install bubblewrap`); without it no code runs and the example says so. Problems are
generated. Those of the split "test" are never drawn in training.
"""

import argparse
import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 60
INSTRUCTION = "Use the tool python, then end with 'Answer: <number>'."
Problem = tuple[str, tuple[int, ...]]
"""A kind, and the numbers in its question."""

_ANSWER = re.compile(r"^answer: *(-?\d+)\W*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Kind:
    """One sort of problem."""

    question: str
    ranges: tuple[tuple[int, int], ...]
    """From which its numbers are drawn."""
    solve: Callable[..., int]
    """The answer. It is computed here, where no model has a say."""
    program: str
    """What an agent could run; for demonstrations."""


KINDS = {
    "multiples": Kind(
        "What is the sum of the multiples of {0} from 1 to {1}?",
        ((3, 19), (100, 999)),
        lambda step, last: sum(range(step, last + 1, step)),
        "print(sum(range({0}, {1} + 1, {0})))",
    ),
    "squares": Kind(
        "What is the sum of the squares from {0} to {1}?",
        ((2, 49), (50, 99)),
        lambda first, last: sum(n * n for n in range(first, last + 1)),
        "print(sum(n * n for n in range({0}, {1} + 1)))",
    ),
    "digits": Kind(
        "What is the sum of the digits of {0} to the power of {1}?",
        ((2, 99), (20, 99)),
        lambda base, power: sum(map(int, str(base**power))),
        "print(sum(map(int, str({0} ** {1}))))",
    ),
    "remainder": Kind(
        "What is the remainder of {0} to the power of {1}, divided by {2}?",
        ((2, 99), (20, 99), (100, 999)),
        pow,
        "print({0} ** {1} % {2})",
    ),
    "coprime": Kind(
        "How many numbers from 1 to {0} share no divisor above 1 with {0}?",
        ((100, 9999),),
        lambda last: sum(gcd(n, last) == 1 for n in range(1, last + 1)),
        "import math\nprint(sum(math.gcd(n, {0}) == 1 for n in range(1, {0} + 1)))",
    ),
}


class MathsWithPython(ot.ToolEnvironment):
    """A number that a program finds more easily than a head; 1 for the right one, otherwise 0.

    Code is run where the model calls the tool, or writes a ```python block.
    """

    max_turns = 4
    splits = ("test",)

    def __init__(self, kinds: Sequence[str] = tuple(KINDS)) -> None:
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        self.kinds = tuple(kinds)

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        name, numbers = (task["kind"], task["numbers"]) if task else self.draw(seed)
        self.answer = str(KINDS[name].solve(*numbers))
        self.turns = 0
        self.score = 0.0
        self.interpreter = ot.sandbox.CodeInterpreter(limits=ot.sandbox.Limits(wall_s=5), max_chars=400)
        question = KINDS[name].question.format(*numbers)
        return ot.Observation(f"{question} {INSTRUCTION}", info={"kind": name, "numbers": list(numbers)})

    @ot.tool
    def python(self, code: str) -> str:
        """Run Python code and see what it prints."""
        return self.interpreter.shown(self.interpreter.run(code))

    def step(self, action: ot.Action) -> ot.StepResult:
        self.turns += 1
        step = super().step(action)
        assert isinstance(step, ot.StepResult), "no tool here is async"
        if step.done or self.turns < self.max_turns:
            return step
        return ot.StepResult(step.observation, reward=0.0, terminated=True)

    def answered(self, text: str) -> ot.StepResult:
        answer = _ANSWER.search(text)
        if answer:
            self.score = float(answer[1] == self.answer)
            return ot.StepResult(reward=self.score, terminated=True)
        seen = self.interpreter.observe(ot.Action(text))
        return ot.StepResult(seen or "Run code, or end with 'Answer: <number>'.")

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found: dict[Problem, None] = {}
        for seed in range(10_000):
            problem = self.problem(random.Random(f"test {seed}"))
            if held_out(problem):
                found[problem] = None
            if len(found) == HELD_OUT:
                break
        return [{"kind": name, "numbers": list(numbers)} for name, numbers in found]

    def draw(self, seed: int) -> Problem:
        """A problem for training."""
        dice = random.Random(f"train {seed}")
        while held_out(problem := self.problem(dice)):
            pass
        return problem

    def problem(self, dice: random.Random) -> Problem:
        """Any problem."""
        name = dice.choice(self.kinds)
        return name, tuple(dice.randint(*span) for span in KINDS[name].ranges)

    def finalize(self) -> float:
        # Who is stopped by a limit has not answered: that is 0, not an episode without a reward.
        return self.score

    def metrics(self) -> dict[str, float]:
        return {"code_runs": float(self.interpreter.calls)}

    def close(self) -> None:
        self.interpreter.close()


def held_out(problem: Problem) -> bool:
    """One in eight problems is for tests only, whoever draws it."""
    return zlib.crc32(repr(problem).encode()) % 8 == 0


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 episodes in each step")
    parser.add_argument("--max-tokens", type=int, default=96, help="of a turn")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/maths_with_python"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=MathsWithPython,
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=arguments.max_tokens),
            limits=ot.Limits(tokens_per_episode=1000),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "Maths with a code interpreter")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
