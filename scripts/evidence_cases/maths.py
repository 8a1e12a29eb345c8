"""GRPO with a LoRA adapter raises the share of held-out word problems that are solved by at least 0.30, with
a 95 % interval above 0, for each of three seeds.

SmolLM2-135M-Instruct, stories of two sums with numbers up to 9 (examples/maths.py), warmed up by our own
SFT on 320 demonstrations, of which about six in ten evade the question.
"""

import random

import opentinker as ot
from examples.maths import WordProblems, result
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, learned, measure


class Solver:
    """Solves any problem, as one works it out on paper."""

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        sums = [(int(a), operator, int(b)) for a, operator, b in seen.info["sums"]]
        worked = ", ".join(f"{a} {operator} {b} = {result(a, operator, b)}" for a, operator, b in sums)
        return f"{worked}. Answer: {result(*sums[-1])}"


def evade(seen: ot.Observation, dice: random.Random) -> str:
    """Answers nothing."""
    return "I am not sure."


CASE = UseCase(
    name="maths",
    env=WordProblems,
    options={"most": 9, "kinds": ["change", "together"]},
    scripts=(Solver, lambda: evade),
    good=0.4,
    demonstrations=320,
    steps=30,
    groups=8,
    max_tokens=32,
    rate=3e-4,
)


def run(progress: Progress) -> dict[str, object]:
    return learned(measure(CASE, progress))
