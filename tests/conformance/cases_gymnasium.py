"""Gymnasium: its own FrozenLake, Taxi and CartPole, and masks, text and dictionaries."""

from opentinker.environments import EndReason
from tests.conformance.case import ADAPTERS, AdapterCase, Ending, legal, say

MAKE = f"{ADAPTERS}.gymnasium:gymnasium_environment"
CRASH = f'{MAKE}("gymnasium_worlds:Crashing-v0")'
NAMES = '("left", "down", "right", "up")'

CASES = [
    AdapterCase(
        name="gymnasium_lake",
        target=f'{MAKE}("FrozenLake-v1", render="ansi", is_slippery=False, actions={NAMES})',
        endings=(
            Ending(say("down", "Down!", "right", "right", "I go down", "right"), returns={"agent": 1.0}),
            Ending(say("right", "down"), returns={"agent": 0.0}),
        ),
        crash=CRASH,
        draws=False,
        masks=True,
        order=(("agent",),) * 6,
    ),
    AdapterCase(
        name="gymnasium_slippery",
        target=f'{MAKE}("FrozenLake-v1", max_episode_steps=20)',
        endings=(Ending(say("2", "1")),),
        crash=CRASH,
        masks=True,
    ),
    AdapterCase(
        name="gymnasium_taxi",
        target=f'{MAKE}("Taxi-v4", max_episode_steps=9)',
        endings=(Ending(legal, EndReason.TRUNCATED, {"agent": -9.0}),),
        crash=CRASH,
        masks=True,
    ),
    AdapterCase(
        name="gymnasium_cartpole",
        target=f'{MAKE}("CartPole-v1", instructions="Keep the pole upright.")',
        endings=(Ending(say("1")), Ending(say("Well, 0 or 1: 1"))),
        crash=CRASH,
        masks=True,
    ),
    AdapterCase(
        name="gymnasium_mask",
        target=f'{MAKE}("gymnasium_worlds:Vault-v0")',
        endings=(Ending(legal), Ending(say("3", "3", "1", "2"))),
        crash=CRASH,
        masks=True,
        order=(("agent",),) * 3,
    ),
    AdapterCase(
        name="gymnasium_text",
        target=f'{MAKE}("gymnasium_worlds:Echo-v0")',
        endings=(Ending(say("dear"), returns={"agent": 0.0}),),
        crash=CRASH,
    ),
    AdapterCase(
        name="gymnasium_box",
        target=f'{MAKE}("gymnasium_worlds:Aim-v0")',
        endings=(Ending(say('{"shot": [0.5, 0], "arm": 1}'), EndReason.TRUNCATED),),
        crash=CRASH,
    ),
]
