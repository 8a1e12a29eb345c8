"""Scores answers in a jail, after the agent's own is gone.

Invariant: a score is what the grading function returned, said over a channel that only its jail has; and in
that jail no code of the agent runs. An answer is data there. Where a grader wants to see what an answer does,
it calls `run(code)`, which has it run in yet another jail and gives back what it printed. So nothing that an
agent writes, prints or leaves behind can become a score. What goes wrong in grading is a failure of the
grader (no reward), never a reward of 0.
"""

import inspect
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker.environments.errors import EnvironmentDefinitionError
from opentinker.environments.rewards import Reward, RewardStatus
from opentinker.sandbox.jail import Data, Jail
from opentinker.sandbox.limits import Ended, Limits
from opentinker.sandbox.process import JailProcess

MAX_COMPONENTS = 64


class Closes(Protocol):
    """What is closed before grading begins: an Interpreter, a CodeInterpreter."""

    def close(self) -> None:
        """End it, and return when nothing of it is left."""
        ...


@dataclass(frozen=True, slots=True)
class Grade:
    """A reward, and for logs how it came about. Never show `said` to a model: it may hold the solution."""

    reward: Reward
    error: str = ""
    """Why there is no reward."""
    said: str = ""
    """What the grading function printed."""


class Grader:
    """A grading function in a jail. Called with an answer and a task it gives a Reward, as `ot.single_turn`
    takes it.

        def grade(answer, task):
            seen = run(answer, stdin=task["input"])
            return float(seen["stdout"].strip() == task["output"])

    `grade` is such a function, or the source text of a module that has one of this name. Of a function only
    its own source goes into the jail: it imports what it needs inside itself. It returns a number, or a dict
    with "value" and "components". `run(code, stdin="", files=None)` gives a dict of stdout, stderr, exit and
    ended.
    """

    def __init__(
        self,
        grade: Callable[..., Any] | str,
        *,
        jail: Jail | None = None,
        run_limits: Limits | None = None,
        max_runs: int = 64,
    ) -> None:
        """`jail` says where the grading function runs, with which limits; `run_limits` are those of each
        `run`, of which there are at most `max_runs` in one grading.
        """
        self._source, self._name = _source_of(grade)
        self._jail = jail or Jail()
        self._run_limits = run_limits or self._jail.limits
        self._max_runs = max_runs

    def __call__(self, answer: str, task: Mapping[str, Any] | None = None) -> Reward:
        """The reward of an answer."""
        return self.grade(answer, task).reward

    def grade(
        self, answer: str, task: Mapping[str, Any] | None = None, *, after: Iterable[Closes] = ()
    ) -> Grade:
        """The grade of an answer. What is in `after` (the agent's interpreters) is closed first."""
        for agents in after:
            agents.close()
        limits = self._jail.limits
        process = self._jail.start(
            "grade",
            limits,
            code=self._source,
            name=self._name,
            answer=answer.encode("utf-8", errors="replace").decode(),
            task=json.loads(json.dumps(dict(task or {}))),
        )
        try:
            return self._listen(process, limits)
        finally:
            process.kill()

    def _listen(self, process: JailProcess, limits: Limits) -> Grade:
        process.feed(b"")
        scores: list[bytes] = []
        asked: list[bytes] = []

        def take(frame: bytes) -> bool:
            # One score: whoever sends a second has more than a grading function in there.
            (asked if frame.startswith(b'{"run"') else scores).append(frame)
            return bool(asked)

        runs = 0
        deadline = time.monotonic() + limits.wall_s
        while not process.pump(max(0.001, deadline - time.monotonic()), take):
            began = time.monotonic()
            runs += 1
            if runs > self._max_runs:
                process.kill()
                return _failed(f"the grader ran more than {self._max_runs} programs", process)
            answer = self._run(asked.pop())
            if answer is None:
                process.kill()
                return _failed("the grader asked for a run in a way that nobody does", process)
            process.send(answer)
            # The limit is the grading function's own: programs that it has run have theirs.
            deadline += time.monotonic() - began
        return _grade(process, scores)

    def _run(self, frame: bytes) -> dict[str, Any] | None:
        try:
            asked = json.loads(frame)["run"]
            code, stdin, files = str(asked["code"]), str(asked["stdin"]), dict(asked["files"])
            given: dict[str, Data] = {str(name): str(data) for name, data in files.items()}
            result = self._jail.run(code, stdin=stdin, files=given, limits=self._run_limits)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return {
            "stdout": result.stdout,
            "stderr": result.stderr,
            "exit": result.exit,
            "ended": str(result.ended),
        }


def output_tests(
    cases: Sequence[tuple[str, str]], *, jail: Jail | None = None, limits: Limits | None = None
) -> Callable[..., Reward]:
    """A reward function for programs: the share of cases (standard input, expected output) that they pass.

    Each runs in a jail of its own; outputs are compared here, without spaces at the ends of lines.
    """
    if not cases:
        raise EnvironmentDefinitionError("output_tests needs at least one case")
    where = jail or Jail()

    def reward(program: str, task: Mapping[str, Any] | None = None) -> Reward:
        passed = 0
        for stdin, expected in cases:
            result = where.run(program, stdin=stdin, limits=limits)
            passed += result.ok and _lines(result.stdout) == _lines(expected)
        return Reward(passed / len(cases), components={"cases_passed": float(passed)})

    return reward


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _grade(process: JailProcess, scores: Sequence[bytes]) -> Grade:
    if process.ended is Ended.TIMEOUT or process.ended is Ended.CPU_LIMIT:
        return _failed("grading took too long", process, RewardStatus.TIMEOUT)
    if process.ended is not Ended.EXITED or process.exit != 0:
        said = process.stderr.decode("utf-8", errors="replace").strip().splitlines()
        last = f": {said[-1][:500]}" if said else ""
        return _failed(f"the grader ended as {process.ended}, status {process.exit}{last}", process)
    if len(scores) != 1:
        return _failed(f"the grader gave {len(scores)} scores", process)
    try:
        return Grade(_reward(scores[0]), said=_said(process))
    except (ValueError, TypeError, RecursionError) as error:
        return _failed(f"the grader's score is none: {error}", process)


def _reward(frame: bytes) -> Reward:
    """Exactly {"score": {"value": number or null, "components": {name: number}}}; finite numbers only."""
    if len(frame) > 1 << 16:
        raise ValueError(f"a score of {len(frame)} bytes")
    said = json.loads(frame, parse_constant=_refuse)
    if not isinstance(said, dict) or set(said) != {"score"} or not isinstance(said["score"], dict):
        raise ValueError("not a score")
    score = said["score"]
    components = score.get("components", {})
    if not set(score) <= {"value", "components"} or "value" not in score or not isinstance(components, dict):
        raise ValueError(f"a score has a value and components, not {sorted(score)}")
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"{len(components)} components, more than {MAX_COMPONENTS}")
    parts = {name: _number(part, f"component {name!r}") for name, part in components.items()}
    if score["value"] is None:
        if parts:
            raise ValueError("components without a value")
        return Reward.unscored()
    return Reward(_number(score["value"], "value"), components=parts)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, int | float):
        raise ValueError(f"{what} is no number")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is not finite")
    return number


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no score")


def _failed(error: str, process: JailProcess, status: RewardStatus = RewardStatus.GRADER_ERROR) -> Grade:
    return Grade(Reward.failed(status), error, _said(process))


def _said(process: JailProcess) -> str:
    return (process.stdout + process.stderr).decode("utf-8", errors="replace")


def _source_of(grade: Callable[..., Any] | str) -> tuple[str, str]:
    """The source text and the name of a grading function. EnvironmentDefinitionError if it has none."""
    if isinstance(grade, str):
        try:
            compile(grade, "<grader>", "exec")
        except (SyntaxError, ValueError) as error:
            raise EnvironmentDefinitionError(f"the grader's source: {error}") from None
        return grade, "grade"
    code = getattr(grade, "__code__", None)
    if code is None or grade.__name__ == "<lambda>" or code.co_freevars:
        raise EnvironmentDefinitionError(
            f"{grade!r} cannot go into a jail: give a function without variables from around it, or source"
        )
    try:
        source = textwrap.dedent(inspect.getsource(grade))
    except (OSError, TypeError):
        raise EnvironmentDefinitionError(f"{grade!r} has no source; give its source text") from None
    # What its annotations name stays outside.
    return f"from __future__ import annotations\n{source}", grade.__name__
