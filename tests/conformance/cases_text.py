"""Libraries of text games and tasks: TextArena, reasoning-gym, GEM, skyrl-gym."""

import random
from collections.abc import Mapping
from typing import Any

from opentinker.environments import Action
from opentinker.environments.agents import Observations
from tests.conformance.case import ADAPTERS, AdapterCase, Ending, say

PAIR = ("player_0", "player_1")
TEXTARENA = f"{ADAPTERS}.textarena:textarena_environment"
GEM = f"{ADAPTERS}.gem:gem_environment"
ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "reward_spec": {"method": "rule", "ground_truth": "4"},
    "extra_info": {"max_turns": 3},
}


def upwards(turn: int, pending: Observations, rng: random.Random) -> Mapping[str, str | Action]:
    """1, 2, 3 … in the ways of both libraries."""
    return dict.fromkeys(pending, f"[{turn}] \\boxed{{{turn}}}")


CASES = [
    AdapterCase(
        name="textarena_tictactoe",
        target=f'{TEXTARENA}("TicTacToe-v0", players=2)',
        endings=(
            # The brackets are put around by the game's own wrapper.
            Ending(say("0", "[3]", "1", "[4]", "2"), returns={"player_0": 1.0, "player_1": -1.0}),
            # A second illegal move loses.
            Ending(say("[9]", "[9]"), returns={"player_0": -1.0, "player_1": 1.0}),
            Ending(
                say("[0]", "[1]", "[2]", "[4]", "[3]", "[5]", "[7]", "[6]", "[8]"),
                returns=dict.fromkeys(PAIR, 0.0),
            ),
        ),
        crash="text_worlds:BadTextArena",
        draws=False,
        order=(PAIR[:1], PAIR[1:], PAIR[:1], PAIR[1:], PAIR[:1]),
    ),
    AdapterCase(
        name="textarena_poker",
        target=f'{TEXTARENA}("KuhnPoker-v0", players=2)',
        endings=(Ending(say("[check]", "[bet]", "[call]", "[check]", "[check]")),),
        order=(PAIR[1:], PAIR[:1]),
        crash="text_worlds:BadTextArena",
    ),
    AdapterCase(
        name="textarena_guess",
        target=f'{TEXTARENA}("GuessTheNumber-v0", max_turns=25)',
        endings=(Ending(upwards, returns={"agent": 1.0}),),
        crash="text_worlds:BadTextArena",
    ),
    AdapterCase(
        name="reasoning_gym",
        target=f'{ADAPTERS}.reasoning_gym:reasoning_gym_environment("chain_sum", size=50, test_size=9, '
        "min_terms=2, max_terms=2, min_digits=1, max_digits=1)",
        endings=(Ending(say("<answer>x</answer>"), returns={"agent": 0.0}),),
        crash="text_worlds:BadReasoning",
    ),
    AdapterCase(
        name="gem_guess",
        target=f'{GEM}("game:GuessTheNumber-v0", max_turns=30)',
        endings=(Ending(upwards, returns={"agent": 1.0}), Ending(say("no idea"))),
        crash="text_worlds:BadGemEnv",
    ),
    AdapterCase(
        name="skyrl_maths",
        target="text_worlds:Maths",
        task=ROW,
        endings=(
            Ending(say("#### 5", "#### 4"), returns={"agent": 0.2 / 3 + 1.0}),
            Ending(say("hm"), returns={"agent": 0.0}),
        ),
        crash="text_worlds:BadSkyRL",
        draws=False,
    ),
    AdapterCase(
        name="skyrl_tools",
        target="text_worlds:Adding",
        task=ROW,
        endings=(Ending(say("add 2 2\nand so on", "4"), returns={"agent": 1.0}),),
        crash="text_worlds:BadSkyRL",
        draws=False,
        order=(("agent",),) * 2,
    ),
]
