"""Tool belts and servers: MCP, TRL's factories, OpenEnv. Environments that own the model loop are given an
endpoint and not moves, so that they have tests of their own (`tests/contract/test_loop_environments.py`).
"""

import random
from pathlib import Path

from opentinker.environments import Action, ToolCall
from tests.conformance.case import SEED, AdapterCase, Ending, say
from tests.libraries.test_openenv import OPENENV
from tests.library_venv import library_python

LIBRARIES = Path(__file__).parent.parent / "libraries"
NUMBER = random.Random(SEED).randint(1, 1000)

ADD = Action("", (ToolCall("add", '{"a": 2, "b": 3}'),))
WRONG = Action("", (ToolCall("add", '{"a": "two"}'), ToolCall("subtract")))
GUESS = Action("", (ToolCall("guess", '{"number": 500}'),))
COUNTING = [f'{{"guess": {number}}}' for number in range(1, 10)]

CASES = [
    AdapterCase(
        name="mcp",
        target="mcp_worlds:Sums",
        task={"prompt": "2 + 3?", "answer": "5"},
        endings=(
            Ending(say(ADD, WRONG, "5"), returns={"agent": 1.0}),
            Ending(say("6"), returns={"agent": 0.0}),
        ),
        crash="mcp_worlds:Sums",
        crash_says=Action("", (ToolCall("die"),)),
        draws=False,
        order=(("agent",),) * 3,
    ),
    AdapterCase(
        name="trl",
        target="trl_worlds:Guessing",
        endings=(
            Ending(say(GUESS, "done"), returns={"agent": 2.0 + 1 - abs(500 - NUMBER) / 1000}),
            Ending(say(""), returns={"agent": 0.0}),
        ),
        crash="trl_worlds:Crashing",
        order=(("agent",),) * 2,
    ),
    AdapterCase(
        name="openenv",
        target="openenv_game:HostedGuess",
        path=(LIBRARIES,),
        # The number of this seed is 8: nothing for the first guess, -0.1 for each other one, 1 at last.
        endings=(Ending(say(*COUNTING), returns={"agent": 1 - 0.1 * 6}),),
        crash="openenv_game:HostedGuess",
        crash_says='{"guess": 77}',
        order=(("agent",),) * 8,
        python=lambda: library_python("openenv", OPENENV),
    ),
]
