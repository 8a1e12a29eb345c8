"""A policy wins at least 80 % of its games of Gomoku against the script, from held-out openings, for each of
three seeds.

SmolLM2-135M-Instruct on a board of 5 by 5, four in a line, with threats told (examples/gomoku.py): warmed up
by our own SFT on 240 demonstrations, of which one in ten is of a player that puts stones anywhere, then
GRPO against the script. Who does what the threats say and plays anywhere otherwise wins three games in four.
"""

import random

import opentinker as ot
from examples.gomoku import Gomoku, expert, script
from scripts.evidence_cases import Progress
from scripts.use_cases import UseCase, measure

WINS = 0.80


def anywhere(seen: ot.Observation, dice: random.Random) -> str:
    """A stone on any free place."""
    return dice.choice(seen.legal_actions)


CASE = UseCase(
    name="gomoku",
    env=Gomoku,
    options={"size": 5, "line": 4, "threats": True},
    agents={"o": script},
    scripts=(lambda: expert, lambda: anywhere),
    good=0.9,
    demonstrations=240,
    steps=20,
    groups=4,
    max_tokens=5,
    samples=4,
)


def run(progress: Progress) -> dict[str, object]:
    found = measure(CASE, progress)
    seeds = found["seeds"].values()
    return {
        **found,
        "bounds": {"held_out_after": f"at least {WINS}", "gain_95": "above 0"},
        "within": all(each["held_out_after"] >= WINS and each["gain_95"][0] > 0 for each in seeds),
    }
