"""What a probe finds, of environments that are wrong in one way each."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from opentinker.environments import Action, Environment, InvalidOptions, Observation, StepResult
from opentinker.environments.builtin import Arithmetic, GuessNumber
from opentinker.environments.probe import FAILED, PASSED, SKIPPED, ProbeReport, probe


class Fair(Environment):
    """Throws a die."""

    def __init__(self, sides: int = 6) -> None:
        self.sides = sides

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self.random = random.Random(seed)
        return self.see()

    def step(self, action: Action) -> StepResult:
        return StepResult(self.see(), reward=1.0, truncated=True)

    def see(self) -> Observation:
        return Observation(f"{self.random.randrange(10**6)} of {self.sides}")


class DropsSeed(Fair):
    """Takes another seed."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return super().reset(seed=time.time_ns(), task=task)


class SaysSo(DropsSeed):
    """Does not repeat itself, and says so."""

    deterministic: ClassVar[bool] = False


class DropsSeedLater(Fair):
    """Repeats its first observation only."""

    def step(self, action: Action) -> StepResult:
        return StepResult(str(time.time_ns()), reward=1.0, truncated=True)


class SharesState(Fair):
    """Draws from the process's randomness, which it seeds."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        random.seed(seed)
        self.turns = 0
        return Observation(str(random.random()))

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(str(random.random()), reward=0.0, truncated=self.turns == 3)


class Constant(Fair):
    """Ignores its seed."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return super().reset(seed=1, task=task)


class ByProcess(Fair):
    """Differs from process to process."""

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        return super().reset(seed=seed + os.getpid(), task=task)


class Worthless(Fair):
    """Gives no number."""

    def step(self, action: Action) -> StepResult:
        return StepResult(None, reward=float("nan"), terminated=True)


class Unscored(Fair):
    """Gives no reward at all."""

    def step(self, action: Action) -> StepResult:
        return StepResult(None, terminated=True)


class Raises(Fair):
    """Is broken."""

    def step(self, action: Action) -> StepResult:
        raise RuntimeError("the goblin left")


class Hangs(Fair):
    """Never answers."""

    def step(self, action: Action) -> StepResult:
        time.sleep(3600)
        raise AssertionError


async def verdicts(cls: type[Environment], **more: Any) -> tuple[ProbeReport, dict[str, str]]:
    report = await probe(cls, **{"seeds": 2, "steps": 4, **more})
    return report, {check.name: check.verdict for check in report.checks}


@pytest.mark.parametrize("cls", [Fair, Arithmetic, GuessNumber])
async def test_nothing_is_wrong(cls: type[Environment]) -> None:
    report, found = await verdicts(cls, seeds=4)
    assert (report.warnings, FAILED in found.values()) == ((), False)
    assert found["two_processes"] == PASSED
    assert report.deterministic
    assert {timing.call for timing in report.timings} == {"reset", "step"}
    assert report.episodes in (10, 12)
    assert all(0 < timing.median_s <= timing.longest_s for timing in report.timings)


@pytest.mark.parametrize(
    ("cls", "failed", "words"),
    [
        (DropsSeed, "repeats", "DROPS ITS SEED"),
        (DropsSeedLater, "repeats", "step 1 came out differently"),
        (SharesState, "interleaved", "exclusive"),
        (Constant, "seed_matters", "SEEMS TO IGNORE ITS SEED"),
        (ByProcess, "two_processes", "another process"),
        (Worthless, "rewards", "reward is nan"),
        (Unscored, "rewards", "no episode that ended has a reward"),
        (Raises, "crashes", "the goblin left"),
    ],
)
async def test_one_thing_is_wrong(cls: type[Environment], failed: str, words: str) -> None:
    report, found = await verdicts(cls)
    assert found[failed] == FAILED
    (warning,) = report.warnings
    assert words in warning
    if failed != "repeats":
        assert [name for name, verdict in found.items() if verdict == FAILED] == [failed]


class ForgetsInCopies(Fair):
    """Keeps its randomness outside of the instance."""

    kept: ClassVar[dict[int, random.Random]] = {}

    def reset(self, *, seed: int, task: dict[str, Any]) -> Observation:
        self.turns = 0
        self.kept[id(self)] = random.Random(seed)
        self.place = id(self)
        return Observation("begin")

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(str(self.kept[self.place].random()), reward=0.0, truncated=self.turns == 4)


class HonestAboutCopies(ForgetsInCopies):
    """Says so."""

    copyable: ClassVar[bool] = False


async def test_copies_that_do_not_hold_the_episode() -> None:
    report, found = await verdicts(ForgetsInCopies)
    assert found["snapshots"] == FAILED
    (warning,) = report.warnings
    assert "copyable = False" in warning
    report, found = await verdicts(HonestAboutCopies)
    assert (found["snapshots"], report.warnings) == (SKIPPED, ())


async def test_who_says_that_he_does_not_repeat_himself_is_not_warned() -> None:
    report, found = await verdicts(SaysSo)
    assert (found["repeats"], found["seed_matters"], report.warnings) == (FAILED, SKIPPED, ())


async def test_a_step_that_hangs_ends() -> None:
    report, found = await verdicts(Hangs, seeds=1, step_timeout_s=0.2)
    assert found["crashes"] == FAILED
    assert "no answer within 0.2 s" in report.check("crashes").detail


async def test_a_class_that_no_other_process_can_import() -> None:
    class Local(Fair):
        """Lives in a function."""

    report, found = await verdicts(Local)
    assert found["two_processes"] == SKIPPED
    assert "cannot be imported" in report.check("two_processes").detail


async def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="seeds must be from 1 to 64"):
        await probe(Fair, seeds=0)
    with pytest.raises(InvalidOptions, match="colour"):
        await probe(Fair, {"colour": "red"})


def test_the_program_prints_one_line_whatever_the_environment_prints(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import opentinker as ot\nprint('at import')\n"
        "class Loud(ot.Environment):\n"
        "    def reset(self, *, seed, task):\n        print('reset'); return ot.Observation(str(seed))\n"
        "    def step(self, action):\n        return ot.StepResult(None, reward=1.0, terminated=True)\n"
    )
    words = [sys.executable, "-m", "opentinker.environments.probe", "loud:Loud", "--path", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, timeout=60)
    report = json.loads(done.stdout)
    assert FAILED not in [check["verdict"] for check in report["checks"]]
    assert b"at import" in done.stderr


def test_the_module_runs_inside_a_loop_of_its_own() -> None:
    assert asyncio.run(probe(Fair, seeds=1, steps=1)).episodes == 4
