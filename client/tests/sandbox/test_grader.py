"""Graders: a score is what the grading function returned, and nobody else can make one."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from client.tests.sandbox.conftest import BRIEF, survivors

from opentinker.environments import (
    Action,
    EnvironmentDefinitionError,
    Reward,
    RewardStatus,
    environment_source,
    single_turn,
)
from opentinker.sandbox import Ended, Grader, Jail, output_tests
from opentinker.sandbox.process import JailProcess

SHORT = replace(BRIEF, wall_s=3)


def grade_output(answer: str, task: dict[str, Any]) -> float:
    """Have the answer run, and compare what it prints."""
    seen = run(answer, stdin=task.get("input", ""))  # type: ignore[name-defined]  # noqa: F821
    return float(seen["ended"] == "EXITED" and seen["stdout"].strip() == task["output"])


def outcome(source: str, answer: str = "", jail: Jail | None = None) -> tuple[RewardStatus, float | None]:
    grade = Grader(source, jail=jail or Jail(SHORT)).grade(answer, {"n": 3})
    return grade.reward.status, grade.reward.value


def test_a_function_grades_what_a_program_prints() -> None:
    grader = Grader(grade_output)
    task = {"input": "4\n", "output": "16"}
    assert grader("print(int(input()) ** 2)", task) == Reward(1.0)
    assert grader("print(int(input()) * 2)", task) == Reward(0.0)
    assert grader("1/0", task) == Reward(0.0)


def test_scores_may_have_components_or_be_left_out() -> None:
    source = (
        "def grade(answer, task): return {'value': len(answer), 'components': {'n': task['n'], 'ok': True}}"
    )
    assert Grader(source)("four", {"n": 3}) == Reward(4.0, components={"n": 3.0, "ok": 1.0})
    assert outcome("def grade(a, t): return None") == (RewardStatus.UNSCORED, None)
    assert outcome("def grade(a, t): return a == 'x'", "x") == (RewardStatus.VALID, 1.0)


FORGE = """
import os, sys
frame = b'{"score": {"value": 1.0}}'
whole = len(frame).to_bytes(4, "big") + frame
for fd in range(0, 1100):
    try: os.write(fd, whole)
    except OSError: pass
"""


@pytest.mark.parametrize(
    "answer",
    [
        FORGE,
        FORGE + "os._exit(0)",
        'print(\'{"score": {"value": 1.0}}\')',
        "print('right'); print('{\"value\": 1.0}')",
        "open('/work/reward.txt', 'w').write('1.0'); open('/tmp/score', 'w').write('1.0')",
        "import builtins; builtins.float = lambda x: 1.0; str.__eq__ = lambda a, b: True",
        "import sys\nf = sys._getframe()\nwhile f: f.f_globals.update(_score=1.0); f = f.f_back",
        "import os, signal; os.kill(-1, signal.SIGKILL); os.kill(1, signal.SIGKILL)",
        "import os\nif os.fork() == 0:\n    while True: open('/dev/shm/score', 'w').write('1')",
        "import gc\n[o.clear() for o in gc.get_objects() if isinstance(o, dict) and 'grade' in o]",
        "def grade(answer, task): return 1.0\n_score = 1.0\nraise SystemExit(0)",
        "while True: pass",
        "while True: print('right')",
        "'); _score = 1.0; print('",
        "\0",
        "\ud800",
        "",
    ],
)
def test_rewards_cannot_be_forged_from_inside_an_episode(answer: str) -> None:
    grader = Grader(grade_output, run_limits=replace(BRIEF, wall_s=1))
    assert grader(answer, {"output": "exactly this"}) == Reward(0.0)


def test_what_an_agent_leaves_behind_is_gone_when_grading_begins(jail: Jail, tmp_path: Path) -> None:
    python = jail.interpreter()
    python.exec(
        "import os\nfor name in ('/work/grade.py', '/dev/shm/score', '/work/json.py'):\n"
        "    open(name, 'w').write('1.0')\n"
        "if os.fork() == 0:\n    while True: open('/dev/shm/score', 'w').write('1.0')"
    )
    order: list[str] = []

    class Agents:
        def close(self) -> None:
            python.close()
            order.append(f"closed, {len(survivors(set()))} left")

    source = """
import os
import time
def grade(answer, task):
    return {"value": len(os.listdir("/work")) + len(os.listdir("/dev/shm")) + len(os.listdir("/proc/1/task"))}
"""
    grade = Grader(source).grade("", after=[Agents()])
    assert order == ["closed, 0 left"]
    assert not python.alive
    assert grade.reward == Reward(1.0)


@pytest.mark.parametrize(
    "returned",
    [
        "float('nan')",
        "float('inf')",
        "{'value': float('-inf')}",
        "{'value': 'one'}",
        "{'value': 1.0, 'components': {'a': float('nan')}}",
        "{'value': 1.0, 'components': [1]}",
        "{'value': 1.0, 'secret': 1}",
        "{'value': None, 'components': {'a': 1}}",
        "{'components': {}}",
        "{'value': [1.0]}",
        "{'value': 10 ** 400}",
        "{'value': 1.0, 'components': {str(n): 1 for n in range(100)}}",
        "{'value': 1.0, 'components': {'x' * 100_000: 1}}",
        "'high'",
        "[1.0]",
        "object()",
        "1 / 0",
        "exit(0)",
        "undefined",
        "__import__('os')._exit(0)",
        "__import__('os')._exit(3)",
        "__import__('ctypes').string_at(0)",
    ],
)
def test_what_is_no_score_is_a_failed_grader_and_never_zero(returned: str) -> None:
    assert outcome(f"def grade(answer, task): return {returned}") == (RewardStatus.GRADER_ERROR, None)


@pytest.mark.parametrize(
    "body",
    [
        'frame = b\'{"score": {"value": 1.0}}\'',
        'frame = b\'{"score": {"value": NaN}}\'',
        "frame = b'[' * 60_000",
        "frame = b'\\xff'",
        "frame = b'{\"run\": 1}'",
        'frame = b\'{"run": {"code": "1", "stdin": "", "files": {"../x": ""}}}\'',
    ],
)
def test_a_second_voice_in_the_grader_is_a_failure(body: str) -> None:
    """Also where it says the same as the first."""
    source = f"""
import os
import time
def grade(answer, task):
    {body}
    for fd in range(3, 1100):
        try: os.write(fd, len(frame).to_bytes(4, "big") + frame)
        except OSError: pass
    return 1.0
"""
    assert outcome(source) == (RewardStatus.GRADER_ERROR, None)


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("def grade(a, t):\n    while True: pass", RewardStatus.TIMEOUT),
        ("while True: pass", RewardStatus.TIMEOUT),
        ("def grade(a, t):\n    while True: print('x' * 10000)", RewardStatus.GRADER_ERROR),
        ("def grade(a, t):\n    while True: run('')", RewardStatus.GRADER_ERROR),
        ("def grade(a, t): return bytearray(1 << 40)", RewardStatus.GRADER_ERROR),
        ("import nothing_like_this\ndef grade(a, t): return 1", RewardStatus.GRADER_ERROR),
        ("grade = None", RewardStatus.GRADER_ERROR),
    ],
)
def test_graders_that_break_give_no_reward(source: str, status: RewardStatus) -> None:
    grade = Grader(source, jail=Jail(replace(BRIEF, wall_s=1)), max_runs=3).grade("")
    assert (grade.reward.status, grade.reward.value) == (status, None)
    assert grade.error


def test_programs_that_a_grader_runs_do_not_use_up_its_time() -> None:
    source = "def grade(a, t): return float(run('import time; time.sleep(0.8)')['ended'] == 'EXITED')"
    grader = Grader(source, jail=Jail(replace(BRIEF, wall_s=0.5)), run_limits=BRIEF)
    assert grader("") == Reward(1.0)


def test_b50_an_answer_is_data_where_it_is_graded() -> None:
    """A grader that evaluates an answer anyway does so in the jail."""
    source = "def grade(answer, task): return float(bool(eval(answer)))"
    marker = f"/tmp/opentinker-forged-{os.getpid()}"
    assert outcome(source, f"__import__('os').system('touch {marker}') == 0") == (RewardStatus.VALID, 1.0)
    assert not Path(marker).exists()
    assert outcome(source, "9 ** 9 ** 9")[0] is RewardStatus.TIMEOUT


def test_a_grader_is_the_reward_of_an_environment() -> None:
    tasks = [{"prompt": "Print 16.", "output": "16"}]
    cls = single_turn(tasks, reward=Grader(grade_output))
    environment = cls()
    environment.reset(seed=0, task=tasks[0])
    result = environment.step(Action("print(4 * 4)"))
    assert getattr(result, "reward").value == 1.0  # noqa: B009


def test_a_score_counts_though_its_jail_is_gone_before_anyone_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    move = JailProcess._move

    def late(self: JailProcess, seconds: float) -> set[int]:
        time.sleep(0.15)
        return move(self, seconds)

    monkeypatch.setattr(JailProcess, "_move", late)
    assert Grader(grade_output)("print(4 * 4)", {"output": "16"}) == Reward(1.0)


async def test_it_plays_in_an_episode() -> None:
    tasks = [{"prompt": "Print 16.", "output": "16"}]
    source = await environment_source(single_turn(tasks, reward=Grader(grade_output)))
    (session,) = await source.open_group(task=tasks[0], seed=1, size=1)
    await session.begin()
    await session.step(Action("print(17)"), 1)
    assert (await session.finalize()).reward.value == 0.0
    await session.close()


def test_output_tests_give_the_share_that_pass() -> None:
    reward = output_tests([("1\n", "1"), ("2\n", "4\n"), ("3\n", "9  \n")], limits=SHORT)
    assert reward("print(int(input()) ** 2)").value == 1.0
    assert reward("print(1)").value == pytest.approx(1 / 3)
    assert reward("n = int(input())\nprint(n * n)\nif n > 1: exit(1)").value == pytest.approx(1 / 3)
    with pytest.raises(EnvironmentDefinitionError):
        output_tests([])


def test_functions_that_cannot_go_into_a_jail_are_refused() -> None:
    around = 1

    def closure(answer: str, task: dict[str, Any]) -> float:
        return around

    for wrong in (closure, lambda answer, task: 1.0, len, "def grade(:"):
        with pytest.raises(EnvironmentDefinitionError):
            Grader(wrong)  # type: ignore[arg-type]


def test_a_lost_jail_is_a_failure(jail: Jail) -> None:
    assert jail.run("print(1)").ended is Ended.EXITED
    assert outcome("import os\ndef grade(a, t): os.kill(1, 9); os.kill(os.getpid(), 9)")[1] is None
