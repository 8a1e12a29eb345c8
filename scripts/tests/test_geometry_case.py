"""The evidence of geometry: what its demonstrations show, how many are right, and when it goes on."""

from pathlib import Path
from typing import Any

import pytest

import opentinker as ot
from examples.geometry import Geometry
from opentinker.supervised.data import Chat, read
from scripts.evidence_cases import Progress, geometry
from scripts.evidence_cases.geometry import EVASION, GOOD, demonstrations

TRUE: dict[tuple[bytes, str], str] = {}
"""The right answers, by figure and question: one figure may be drawn for two."""


def test_demonstrations_show_figures_and_some_are_right() -> None:
    rows = demonstrations(0, 300)
    assert rows == demonstrations(0, 300) != demonstrations(1, 300)
    chats = read(rows, "data")
    assert all(isinstance(chat, Chat) and [len(each) for each in chat.images] == [1, 0] for chat in chats)
    said = [row["messages"][1]["content"] for row in rows]
    right = 0
    for row in rows:
        (image, question), answer = row["messages"][0]["content"], row["messages"][1]["content"]
        assert question.startswith("How many ")
        right += answer == TRUE[image.data, question]
    assert GOOD - 0.1 < right / 300 < GOOD + 0.1
    assert said.count(EVASION) == 300 - right


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = Geometry.reset

    def watched(self: Any, **given: Any) -> Any:
        seen = reset(self, **given)
        assert seen.content is not None
        question = ot.Observation(seen.content.parts[1]).text
        TRUE[seen.content.images[0].data, question] = str(self.figure.answer)
        return seen

    monkeypatch.setattr(Geometry, "reset", watched)


def test_a_seed_that_was_stopped_goes_on_after_its_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def warm_up(seed: int, folder: Path, state_dir: Path) -> dict[str, Any]:
        done.append(f"warm {seed}")
        return {"checkpoint": f"of {seed}"}

    def reinforce(seed: int, folder: Path, state_dir: Path, warm: dict[str, Any]) -> dict[str, Any]:
        done.append(f"learn {seed}")
        if len(done) == 2:
            raise KeyboardInterrupt
        gain = 0.5 if warm["checkpoint"] != "of 2" else 0.1
        return {"gain": gain, "gain_95": [0.05, 0.9]}

    monkeypatch.setattr(geometry, "warm_up", warm_up)
    monkeypatch.setattr(geometry, "reinforce", reinforce)
    with pytest.raises(KeyboardInterrupt):
        geometry.run(Progress(tmp_path, "abc"))
    found = geometry.run(Progress(tmp_path, "abc"))
    assert done == ["warm 0", "learn 0", "learn 0", "warm 1", "learn 1", "warm 2", "learn 2"]
    assert found["within"] is False
