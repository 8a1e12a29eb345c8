"""The interpreter that keeps its variables, and the tool that agents call."""

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from client.tests.sandbox.conftest import BRIEF

from opentinker.environments import Action, ToolCall
from opentinker.sandbox import CodeInterpreter, Ended, InterpreterEnded, Jail, Limits

TO_ALL = "import os\nfor fd in range(3, 1100):\n    try: %s\n    except OSError: pass"
"""Does something to every descriptor that is no standard one."""


def test_variables_are_kept(jail: Jail) -> None:
    with jail.interpreter(files={"data.txt": "7"}) as python:
        assert python.exec("x = int(open('data.txt').read())\nx + 1").stdout == "8\n"
        assert python.exec("def f(y):\n    return x * y").stdout == ""
        assert python.exec("print('a')\nf(6)").stdout == "a\n42\n"
        assert python.exec("None").stdout == ""
        assert python.exec("").ended is Ended.EXITED


def test_what_raises_is_told_and_ends_nothing(jail: Jail) -> None:
    with jail.interpreter() as python:
        python.exec("x = 1")
        for code, said in (("1/0", "ZeroDivisionError"), ("x +", "SyntaxError"), ("exit(3)", "")):
            result = python.exec(code)
            assert result.exit == (3 if code == "exit(3)" else 1)
            assert said in result.stderr
            assert result.stdout == ""
        assert python.exec("x").stdout == "1\n"


def test_each_exec_has_its_own_output(jail: Jail) -> None:
    with jail.interpreter() as python:
        for number in range(1, 50):
            result = python.exec(f"import sys; print({number}); print(-{number}, file=sys.stderr)")
            assert (result.stdout, result.stderr) == (f"{number}\n", f"-{number}\n")


def test_a_deadline_ends_it_with_what_it_started(jail: Jail) -> None:
    with jail.interpreter() as python:
        python.exec("import os, time\nif os.fork() == 0: time.sleep(600)")
        result = python.exec("print('begun')\nwhile True: pass", wall_s=0.5)
        assert (result.ended, result.stdout) == (Ended.TIMEOUT, "begun\n")
        assert not python.alive
        with pytest.raises(InterpreterEnded, match="TIMEOUT"):
            python.exec("1")


def test_each_exec_has_its_own_deadline_and_cpu_time() -> None:
    with Jail(replace(BRIEF, cpu_s=1)).interpreter() as python:
        busy = "import time; t = time.process_time()\nwhile time.process_time() - t < 0.6: pass"
        for _ in range(3):
            assert python.exec(busy).ended is Ended.EXITED
        assert python.exec("while True: pass").ended is Ended.CPU_LIMIT


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import os; os._exit(4)", Ended.EXITED),
        ("import ctypes; ctypes.string_at(0)", Ended.SIGNALLED),
        ("while True: print('x' * 10000)", Ended.OUTPUT_LIMIT),
        (TO_ALL % "os.close(fd)", None),
        (TO_ALL % "os.write(fd, b'\\xff' * 100)", None),
        (TO_ALL % "os.write(fd, b'\\0\\0\\0\\5done ')", None),
    ],
)
def test_breaking_the_interpreter_ends_it_alone(jail: Jail, code: str, ended: Ended | None) -> None:
    with jail.interpreter(limits=replace(BRIEF, wall_s=2)) as python, jail.interpreter() as other:
        other.exec("x = 5")
        result = python.exec(code)
        if ended is not None:
            assert result.ended is ended
            assert not python.alive
        assert other.exec("x").stdout == "5\n"


def test_forged_answers_are_only_its_own(jail: Jail) -> None:
    """Saying "done" early shortens an exec's output; the next one still has its deadline."""
    forge = """
import os, time
frame = b"done 1 0 0 0"
for fd in range(3, 1100):
    try: os.write(fd, len(frame).to_bytes(4, "big") + frame)
    except OSError: pass
while True: time.sleep(1)
"""
    with jail.interpreter(limits=replace(BRIEF, wall_s=1)) as python:
        assert python.exec(forge).ended is Ended.EXITED
        assert python.exec("1").ended is Ended.TIMEOUT


def test_it_outlives_the_thread_that_started_it(jail: Jail) -> None:
    made = []
    thread = threading.Thread(target=lambda: made.append(jail.interpreter()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as python:
        assert python.exec("6 * 7").stdout == "42\n"


def test_one_that_is_forgotten_is_ended(jail: Jail) -> None:
    jail.interpreter().exec("import os\nos.fork()")


def test_one_that_was_never_used_is_ended(jail: Jail) -> None:
    for _ in range(5):
        jail.interpreter().close()


def test_a_fork_is_no_second_interpreter(jail: Jail) -> None:
    with jail.interpreter() as python:
        python.exec("import os, time; x = 0")
        for number in range(1, 10):
            python.exec("if os.fork() == 0:\n    x = 100")
            assert python.exec("x += 1; x").stdout == f"{number}\n"


def test_it_can_be_closed_while_it_runs(jail: Jail) -> None:
    python = jail.interpreter()
    python.exec("1")
    closing = threading.Timer(0.3, python.close)
    closing.start()
    result = python.exec("while True: pass")
    closing.join()
    assert (result.ended, result.exit, python.alive) == (Ended.LOST, None, False)
    assert result.wall_s < 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "no JSON object"),
        ("null", "no JSON object"),
        ("{}", "there is no code"),
        ('{"code": 5}', "must be a string"),
        ('{"code": "1", "timeout": 9}', "no argument 'timeout'"),
        ('{"source": "1"}', "there is no code"),
    ],
)
def test_b66_malformed_calls_are_told_to_the_model(arguments: str, said: str) -> None:
    tool = CodeInterpreter()
    assert said in tool.call(arguments)
    assert tool.calls == 0
    tool.close()


@pytest.mark.parametrize("code", ["\ud800", "x = '\ud800'", "\0", "print('\\ud800')"])
def test_code_that_is_no_text_is_told_to_the_model(code: str) -> None:
    tool = CodeInterpreter()
    assert tool.call(json.dumps({"code": code}))
    assert tool.call({"code": "1 + 1"}) == "2"
    tool.close()


def test_calls_share_variables_or_do_not() -> None:
    kept, each = CodeInterpreter(), CodeInterpreter(persistent=False)
    assert kept.call({"code": "x = 4"}) == "(no output)"
    assert kept.call({"code": "x"}) == "4"
    assert each.call({"code": "x = 4"}) == "(no output)"
    assert "NameError" in each.call({"code": "print(x)"})
    assert each.call({"code": "exit(2)"}) == "(exit status 2)"
    assert "kept" in kept.description
    kept.close()
    each.close()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("print('begun')\nwhile True: pass", "longer than 1 s"),
        ("import os; print('begun', flush=True); os._exit(0)", "ended its interpreter"),
        ("while True: print('begun')", "printed more than"),
    ],
)
def test_what_ends_the_interpreter_is_told_and_another_goes_on(code: str, why: str) -> None:
    tool = CodeInterpreter(limits=Limits(wall_s=1))
    tool.call({"code": "x = 1"})
    said = tool.call({"code": code})
    assert said.startswith("begun")
    assert why in said
    assert "variables are gone" in said
    assert "NameError" in tool.call({"code": "x"})
    tool.close()


def test_long_output_is_cut_for_the_model() -> None:
    tool = CodeInterpreter(max_chars=200)
    said = tool.call({"code": "print('a' * 5000 + 'z')"})
    assert len(said) < 300
    assert said.startswith("aaa")
    assert said.endswith("z")
    assert "left out" in said
    tool.close()


def test_an_action_is_observed() -> None:
    tool = CodeInterpreter()
    assert tool.observe(Action("I think that it is 4.")) is None
    text = tool.observe(Action("Let me see.\n```python\nx = 6\nprint(x * 7)\n```\nand"))
    assert text is not None
    assert text.text == "42"
    calls = (
        ToolCall("python", '{"code": "x"}', "a"),
        ToolCall("bash", "{}", "b"),
        ToolCall("python", "{", "c"),
    )
    seen = tool.observe(Action("", calls))
    assert seen is not None
    assert [(message.role, message.tool_call_id) for message in seen.messages] == [
        ("tool", "a"),
        ("tool", "b"),
        ("tool", "c"),
    ]
    said = [message.content.text for message in seen.messages]
    assert said[0] == "6"
    assert "no tool 'bash'" in said[1]
    assert "no JSON" in said[2]
    tool.close()


def test_what_it_tells_of_itself() -> None:
    tool = CodeInterpreter(name="calculator")
    function: dict[str, Any] = tool.schema["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["required"] == ["code"]
    tool.close()
    with pytest.raises(RuntimeError, match="closed"):
        tool.run("1")
    with pytest.raises(ValueError, match="max_chars"):
        CodeInterpreter(max_chars=1)
    with pytest.raises(ValueError, match="limits"):
        CodeInterpreter(jail=Jail(), limits=Limits())
