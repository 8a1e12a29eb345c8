"""A case that was stopped goes on with the parts it lacks."""

from pathlib import Path

import pytest

from scripts.evidence_cases import Progress


def test_a_finished_part_is_not_measured_again(tmp_path: Path) -> None:
    measured: list[str] = []

    def measure() -> dict[str, int]:
        measured.append("one")
        return {"figure": 7}

    for _ in range(2):
        assert Progress(tmp_path, "abc").part("one", measure) == {"figure": 7}
    assert measured == ["one"]


def test_a_failed_part_and_another_commit_are_measured_again(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Progress(tmp_path, "abc").part("one", fail)
    assert Progress(tmp_path, "abc").part("one", lambda: 1) == 1
    assert Progress(tmp_path, "def").part("one", lambda: 2) == 2
