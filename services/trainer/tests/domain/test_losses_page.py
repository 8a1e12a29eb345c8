"""docs/losses.md says what there is: every loss, every option with its default, every correction."""

import re
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest

from opentinker_trainer.domain import losses
from opentinker_trainer.domain.losses import TYPED_NAMES, CorrectionKind
from opentinker_trainer.domain.registered import registered_kinds

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "losses.md").read_text()
ROWS = {
    cells[0]: cells
    for line in PAGE.splitlines()
    if line.startswith("| `") and (cells := [cell.strip(" `") for cell in line.strip("|").split(" |")])
}
TYPED = {name: getattr(losses, name.title().replace("_", "")) for name in TYPED_NAMES}


@pytest.mark.parametrize("name", [*TYPED, *registered_kinds()])
def test_options_and_defaults_are_as_the_page_says(name: str) -> None:
    kind = TYPED.get(name) or registered_kinds()[name]
    # The first backtick of a cell is stripped.
    said = dict(re.findall(r"(?:^|`)(\w+)` ([\w.]+)", ROWS[name][-1]))
    assert said.keys() == {field.name for field in fields(kind)}
    for field in fields(kind):
        default = field.default
        if default is None or default is False:
            assert said[field.name] == "off"
        elif isinstance(default, Enum):
            assert said[field.name] == default.value
        else:
            assert float(said[field.name]) == default


def test_every_correction_has_a_row() -> None:
    assert {kind.name for kind in CorrectionKind} <= ROWS.keys()
