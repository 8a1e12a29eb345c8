"""GRPO raises the share of held-out problems that an agent with a code interpreter solves by at least 0.30,
with a 95 % interval above 0, for each of three seeds.

SmolLM2-135M-Instruct, sums of multiples, sums of digits of powers, remainders of powers
(examples/maths_with_python.py), warmed up by our own SFT on 160 demonstrations, of which about seven in
ten guess and run no code. Code runs in jails.
"""

import json
import random

import opentinker as ot
from examples.maths_with_python import KINDS, MathsWithPython
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, learned, measure


class Programmer:
    """Has Python compute the number, then says it."""

    def __call__(self, seen: ot.Observation, dice: random.Random) -> str:
        if seen.messages:
            return f"Answer: {seen.text.strip()}"
        code = KINDS[seen.info["kind"]].program.format(*seen.info["numbers"])
        call = json.dumps({"name": "python", "arguments": {"code": code}})
        return f"<tool_call>\n{call}\n</tool_call>"


def guess(seen: ot.Observation, dice: random.Random) -> str:
    """Says any number."""
    return f"Answer: {dice.randint(10, 9999)}"


CASE = UseCase(
    name="maths_with_python",
    env=MathsWithPython,
    options={"kinds": ["multiples", "digits", "remainder"]},
    scripts=(Programmer, lambda: guess),
    good=0.3,
    demonstrations=160,
    steps=20,
    groups=6,
    max_tokens=64,
    limits=ot.Limits(tokens_per_episode=480),
)


def run(progress: Progress) -> dict[str, object]:
    return learned(measure(CASE, progress))
