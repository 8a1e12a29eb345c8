"""The environment of the example, played by hand: what a model may do in it, and what it gets."""

import json
from typing import Any

import pytest

import opentinker as ot
from examples.maths_with_python import HELD_OUT, KINDS, MathsWithPython, held_out
from opentinker.environments import Action, environment_source

TASK = {"kind": "multiples", "numbers": [7, 150]}
ANSWER = str(sum(range(7, 151, 7)))
BLOCK = "Let me count.\n```python\nsum(range(7, 151, 7))\n```"


def call(code: str) -> Action:
    return Action("", (ot.ToolCall("python", json.dumps({"code": code})),))


async def play(*said: str | Action) -> tuple[list[str], float | None, dict[str, Any]]:
    """What the agent is shown after each of these, the reward and the metrics."""
    source = await environment_source(MathsWithPython)
    (session,) = await source.open_group(task=TASK, seed=5, size=1)
    shown = [(await session.begin()).text]
    for seq, each in enumerate(said, start=1):
        action = Action(each.replace("{seen}", shown[-1])) if isinstance(each, str) else each
        result = await session.step(action, seq)
        shown.append("" if result.observation is None else result.observation.text)
    end = await session.finalize()
    await session.close()
    return shown, end.reward.value, dict(end.metrics)


@pytest.mark.parametrize("look", [call("sum(range(7, 151, 7))"), BLOCK], ids=["tool", "block"])
async def test_code_then_an_answer(look: str | Action) -> None:
    shown, reward, metrics = await play(look, "So it is.\nAnswer: {seen}")
    assert "multiples of 7 from 1 to 150" in shown[0]
    assert shown[1] == ANSWER
    assert (reward, metrics) == (1.0, {"code_runs": 1.0})


async def test_variables_are_kept_between_calls() -> None:
    shown, reward, metrics = await play(call("x = 150"), call("sum(range(7, x + 1, 7))"), "Answer: {seen}")
    assert shown[2] == ANSWER
    assert (reward, metrics) == (1.0, {"code_runs": 2.0})


async def test_mistakes_are_observations_and_turns_end() -> None:
    wrong = ("I do not know.", "```python\n1 / 0\n```", "```python\nprint('Answer: 1')\n```", "Hm.")
    shown, reward, _ = await play(*wrong)
    assert "Run code" in shown[1]
    assert "ZeroDivisionError" in shown[2]
    assert reward == 0.0


async def test_who_is_stopped_before_an_answer_gets_0() -> None:
    _, reward, metrics = await play(call("1"))
    assert (reward, metrics) == (0.0, {"code_runs": 1.0})


async def test_tools_that_are_not_there_are_told_and_turns_end() -> None:
    calls = [Action("", (ot.ToolCall("shell", "{}"),))] * MathsWithPython.max_turns
    shown, reward, _ = await play(*calls)
    assert "there is no tool 'shell'" in shown[1]
    assert reward == 0.0


@pytest.mark.parametrize(
    "text", ["Answer:", "Answer: 1", f"Answer: {ANSWER}0", f"Answer: {ANSWER}.5", f"-{ANSWER}"]
)
async def test_only_the_number_counts(text: str) -> None:
    _, reward, _ = await play(
        text, *["-"] * (MathsWithPython.max_turns - 1) if "Answer: " not in text else ()
    )
    assert reward == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import gc\nfor o in gc.get_objects():\n    if hasattr(o, 'answer'): o.answer = '1'",
        "import sys\nsys.stdout.write('Answer: 1')",
        "import os\nos.kill(-1, 9)",
        "while True: pass",
    ],
)
async def test_code_cannot_make_a_wrong_answer_right(code: str) -> None:
    _, reward, _ = await play(f"```python\n{code}\n```", "Answer: 1")
    assert reward == 0.0


@pytest.mark.parametrize("name", KINDS)
async def test_the_demonstrated_program_finds_the_answer(name: str) -> None:
    """Jailed code and the environment compute the same, each in its way."""
    _, numbers = MathsWithPython([name]).draw(3)
    kind = KINDS[name]
    printed = ot.sandbox.Jail().run(kind.program.format(*numbers)).stdout
    assert printed.strip() == str(kind.solve(*numbers))


def test_held_out_problems_are_never_drawn() -> None:
    environment = MathsWithPython()
    tasks = environment.tasks("test") or ()
    listed = {(task["kind"], tuple(task["numbers"])) for task in tasks}
    assert len(listed) == len(tasks) == HELD_OUT
    assert {kind for kind, _ in listed} == set(KINDS)
    assert all(map(held_out, listed))
    assert not any(held_out(environment.draw(seed)) for seed in range(500))
    assert environment.draw(1) == environment.draw(1) != environment.draw(2)
    assert environment.tasks("train") is None
