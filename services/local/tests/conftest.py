"""Stacks whose scheduler and env_host are small servers on the kit; everything else is real."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opentinker_local import StackInfo, start_stack, stop_stack

HERE = Path(__file__).parent
FAKE = (sys.executable, str(HERE / "fake_stack.py"))
StartFake = Callable[..., StackInfo]


@pytest.fixture(autouse=True)
def _fake_services_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def start_fake(tmp_path: Path) -> Iterator[StartFake]:
    """Starts stacks, by default in one directory; they are stopped at the end."""
    started: list[Path] = []

    def start(directory: Path | None = None, **options: Any) -> StackInfo:
        state_dir = directory or tmp_path / "stack"
        started.append(state_dir)
        return start_stack(state_dir, command=FAKE, **options)

    yield start
    for directory in started:
        stop_stack(directory)
