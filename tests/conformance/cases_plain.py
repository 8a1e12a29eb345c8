"""What needs no library: functions with a reward function, and games of OpenTinker's research code."""

from opentinker.environments import Action
from tests.conformance.case import ADAPTERS, AdapterCase, Ending, say
from tests.conformance.worlds.functions_worlds import TASKS

DICE = f'{ADAPTERS}.games:game_environment("games_worlds:Dice", sides=1000)'
RIGHT = Ending(say("4"), returns={"agent": 1.0})
WRONG = Ending(say("5"), returns={"agent": 0.0})
UNSCORED = Ending(say("pass"), returns={"agent": None})

CASES = [
    AdapterCase(
        name="function",
        target="functions_worlds:Sums",
        task=TASKS["train"][0],
        endings=(RIGHT, WRONG, UNSCORED),
        crash="functions_worlds:Crashing",
        draws=False,
    ),
    AdapterCase(
        name="async_function",
        target="functions_worlds:SumsLater",
        task=TASKS["train"][0],
        endings=(RIGHT, WRONG, UNSCORED),
        crash="functions_worlds:Crashing",
        draws=False,
    ),
    AdapterCase(
        name="game",
        target=DICE,
        endings=(Ending(say("roll", "roll", "roll", "hold")),),
        crash=DICE,
        crash_says=Action("crash"),
        order=(("agent",),) * 4,
    ),
]
