"""The settings in docs/recipes*.md are settings that `fit()` takes: each call is checked as `fit()` checks it
before it starts anything.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from examples.customer_service import CustomerService
from examples.geometry import Geometry
from examples.gomoku import Gomoku, script
from examples.household import Household
from examples.maths import WordProblems
from examples.maths_with_python import MathsWithPython
from examples.phone import PhoneUse
from opentinker.environments.base import make
from opentinker.loop import fit as fitting

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("recipes*.md"))
BLOCKS = [
    block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]
USE_CASES = (CustomerService, Geometry, Gomoku, Household, MathsWithPython, PhoneUse, WordProblems)


@pytest.mark.parametrize("block", BLOCKS)
def test_settings_are_accepted(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def fit(env: Any, model: str, **options: Any) -> None:
        known, later = fitting._known(options), fitting._unknown(options)
        given = {**fitting._DEFAULTS, "env": env, "model": model, **known, "later": later}
        planned.append(fitting._plan(given))
        make(env, options.get("env_options", {}))

    monkeypatch.setattr(ot, "fit", fit)
    classes = {each.__name__: each for each in USE_CASES}
    exec(block, {"ot": ot, "script": script, **classes})
    assert len(planned) == 1


def test_every_use_case_has_a_recipe() -> None:
    assert len(BLOCKS) == len(USE_CASES)
