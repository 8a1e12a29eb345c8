"""Setting up from nothing: what is skipped, what is said when something is missing."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import setup_env


def succeed(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.CompletedProcess(command, 0, "")


def test_without_a_cpu_torch_one_line_says_so_and_offers_the_other_engine(tmp_path: Path) -> None:
    def only_torch_for_real(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        if setup_env.TORCH not in command:
            return succeed(command)
        nowhere = ["--no-index", "--find-links", str(tmp_path), "--dry-run", "--ignore-installed"]
        pip = [sys.executable, "-m", "pip", "--isolated", "install", *nowhere, setup_env.TORCH]
        # Without any configuration of this machine, which may name a folder that has the CPU build.
        command = ["env", "PIP_CONFIG_FILE=/dev/null", *pip]
        return setup_env.run_captured(command)

    with pytest.raises(setup_env.SetupError) as caught:
        setup_env.install(tmp_path, "vllm", only_torch_for_real)
    said = str(caught.value)
    assert "\n" not in said
    assert "torch==2.13.0+cpu" in said
    assert "make setup ENGINE=transformers" in said


def test_the_transformers_engine_does_not_ask_for_a_cpu_build() -> None:
    words = [word for step in setup_env.steps("transformers") for word in step.pip]
    assert setup_env.TORCH not in words
    assert setup_env.VLLM not in words


def test_wheels_that_do_not_load_are_removed_last() -> None:
    for engine in ("vllm", "transformers"):
        assert setup_env.steps(engine)[-1].pip[0] == "uninstall"


def test_another_failure_of_pip_shows_its_last_words(tmp_path: Path) -> None:
    def fail(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(command, 1, "no space left on device")

    with pytest.raises(setup_env.SetupError, match="no space left on device"):
        setup_env.install(tmp_path, "vllm", fail)


def test_nothing_is_done_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def record(folder: Path, engine: str) -> None:
        ran.append(engine)

    monkeypatch.setattr(setup_env, "install", record)
    monkeypatch.setattr(setup_env, "create_venv", lambda folder: folder.mkdir(exist_ok=True))
    venv = str(tmp_path / "venv")
    assert setup_env.main(["--venv", venv]) == 0
    assert setup_env.main(["--venv", venv]) == 0
    assert ran == ["vllm"]
    assert setup_env.main(["--venv", venv, "--engine", "transformers"]) == 0
    assert setup_env.main(["--venv", venv]) == 0, "the engine that was chosen stays chosen"
    assert ran == ["vllm", "transformers"]


def test_a_failed_setup_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fail(folder: Path, engine: str) -> None:
        ran.append(engine)
        raise setup_env.SetupError("setup: no")

    monkeypatch.setattr(setup_env, "install", fail)
    monkeypatch.setattr(setup_env, "create_venv", lambda folder: folder.mkdir(exist_ok=True))
    for _ in range(2):
        assert setup_env.main(["--venv", str(tmp_path / "venv")]) == 1
    assert len(ran) == 2


def test_each_distribution_of_the_repository_is_installed() -> None:
    present = {
        path.parent.relative_to(setup_env.ROOT).as_posix()
        for pattern in ("client/pyproject.toml", "protos/pyproject.toml", "services/*/pyproject.toml")
        for path in setup_env.ROOT.glob(pattern)
    }
    assert {path.split("[")[0] for path in setup_env.DISTRIBUTIONS} == present
