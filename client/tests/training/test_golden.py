"""No reference value is left unused."""

from pathlib import Path

import pytest
from client.tests.training.golden import CASES

OPTIONAL = {"L7", "L11", "L12"}
"""Other systems' own mixtures of losses, which are not offered."""

TESTS = "".join(
    path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)
)


@pytest.mark.parametrize("case", sorted(CASES.keys() - OPTIONAL))
def test_each_case_is_used(case: str) -> None:
    assert f'"{case}"' in TESTS
