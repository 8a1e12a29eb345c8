"""GRPO raises the share of chores that are done in held-out houses by at least 0.30, with a 95 % interval
above 0, for each of three seeds.

SmolLM2-135M-Instruct in houses of five pieces of furniture, chores "put" and "look" within ten commands
(examples/household.py), warmed up by our own SFT on 120 demonstrations, half of which wander about.
"""

from examples.household import Household, Resident, wanderer
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, learned, measure

CASE = UseCase(
    name="household",
    env=Household,
    options={"size": 5, "turns": 10, "chores": ["put", "look"]},
    scripts=(Resident, lambda: wanderer),
    good=0.5,
    demonstrations=120,
    steps=16,
    groups=4,
    max_tokens=10,
)


def run(progress: Progress) -> dict[str, object]:
    return learned(measure(CASE, progress))
