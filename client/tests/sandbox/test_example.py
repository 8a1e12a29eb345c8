"""The environment of the example, played by hand: what a model may do in it, and what it gets."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from opentinker.environments import Action, environment_source

PATH = Path(__file__).resolve().parents[3] / "examples" / "maths_with_python.py"

LOOK = "Let me count.\n```python\nsum(range({step}, {last} + 1, {step}))\n```"


@pytest.fixture
def environment() -> Any:
    spec = importlib.util.spec_from_file_location("maths_with_python", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MathsWithPython


async def play(environment: Any, *texts: str) -> tuple[list[str], float | None, dict[str, float]]:
    """What the agent is shown after each of these, the reward and the metrics."""
    source = await environment_source(environment)
    (session,) = await source.open_group(task={}, seed=5, size=1)
    shown = [(await session.begin()).text]
    words = shown[0].split()
    step, last = words[words.index("of", 4) + 1], words[words.index("to") + 1].rstrip(".")
    for seq, text in enumerate(texts, start=1):
        text = text.replace("{step}", step).replace("{last}", last).replace("{seen}", shown[-1])
        result = await session.step(Action(text), seq)
        shown.append("" if result.observation is None else result.observation.text)
    end = await session.finalize()
    await session.close()
    return shown, end.reward.value, dict(end.metrics)


async def test_code_then_an_answer(environment: Any) -> None:
    shown, reward, metrics = await play(environment, LOOK, "So it is.\nAnswer: {seen}")
    assert shown[1].isdecimal()
    assert (reward, metrics) == (1.0, {"code_runs": 1.0})


async def test_mistakes_are_observations_and_turns_end(environment: Any) -> None:
    wrong = ("I do not know.", "```python\n1 / 0\n```", "```python\nprint('Answer: 1')\n```", "Hm.")
    shown, reward, _ = await play(environment, *wrong)
    assert "Run code" in shown[1]
    assert "ZeroDivisionError" in shown[2]
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
async def test_code_cannot_make_a_wrong_answer_right(environment: Any, code: str) -> None:
    _, reward, _ = await play(environment, f"```python\n{code}\n```", "Answer: 1")
    assert reward == 0.0
