"""PettingZoo: its own tic-tac-toe and rock-paper-scissors, and agents that are out early."""

from collections.abc import Mapping

from opentinker.environments import EndReason
from tests.conformance.case import ADAPTERS, AdapterCase, Ending, Play, legal, say

MAKE = f"{ADAPTERS}.pettingzoo:pettingzoo_environment"
PAIR = ("player_1", "player_2")


def turns(*moves: Mapping[str, str]) -> Play:
    """What the agents say, turn by turn."""
    return lambda turn, pending, rng: moves[turn - 1]


CASES = [
    AdapterCase(
        name="pettingzoo_tictactoe",
        target=f'{MAKE}("classic/tictactoe_v3")',
        endings=(
            Ending(say("0", "3", "1", "4", "2"), returns={"player_1": 1.0, "player_2": -1.0}),
            # The second move is taken, and is asked for again.
            Ending(say("0", "0", "3", "1", "4", "2"), returns={"player_1": 1.0, "player_2": -1.0}),
            Ending(say("0", "1", "2", "4", "3", "5", "7", "6", "8"), returns=dict.fromkeys(PAIR, 0.0)),
            Ending(legal),
        ),
        crash=f'{MAKE}("zoo_worlds")',
        crash_says="1",
        draws=False,
        masks=True,
        order=(PAIR[:1], PAIR[1:], PAIR[:1], PAIR[1:], PAIR[:1]),
    ),
    AdapterCase(
        name="pettingzoo_rps",
        target=f'{MAKE}("pettingzoo.classic.rps_v2", parallel=True, max_cycles=3, '
        'actions=("rock", "paper", "scissors"))',
        endings=(
            Ending(
                turns(
                    {"player_0": "rock", "player_1": "I play scissors."},
                    {"player_0": "paper", "player_1": "Rock"},
                    {"player_0": "rock", "player_1": "paper"},
                ),
                EndReason.TRUNCATED,
                {"player_0": 1.0, "player_1": -1.0},
            ),
        ),
        crash=f'{MAKE}("zoo_worlds")',
        crash_says="1",
        draws=False,
        masks=True,
        order=(("player_0", "player_1"),) * 3,
    ),
    AdapterCase(
        name="pettingzoo_out_early",
        target=f'{MAKE}("zoo_worlds", instructions="Say 0 to leave.")',
        endings=(
            # Red leaves and is told so with -2; blue leaves; green gets 1 of each, and 5.
            Ending(
                say("2", "2", "2", "0", "2", "0"),
                returns={"red": -2.0, "green": 7.0, "blue": -1.0 + 1.0},
            ),
        ),
        crash=f'{MAKE}("zoo_worlds")',
        crash_says="1",
        masks=True,
        order=(("red",), ("green",), ("blue",), ("red",), ("green",), ("blue",)),
    ),
    AdapterCase(
        name="pettingzoo_race",
        target=f'{MAKE}("zoo_worlds", parallel=True)',
        endings=(
            Ending(
                turns(
                    {"hare": "2", "tortoise": "1"},
                    {"hare": "1", "tortoise": "I rest."},
                    {"tortoise": "0"},
                    {"tortoise": "1"},
                ),
                returns={"hare": 1.0, "tortoise": 0.0},
            ),
        ),
        crash=f'{MAKE}("zoo_worlds")',
        crash_says="1",
        masks=True,
        # The tortoise is asked again; the hare's move of that turn waits for it.
        order=(("hare", "tortoise"), ("hare", "tortoise"), ("tortoise",), ("tortoise",)),
    ),
]
