"""What the warm-up learns from: never what is held out, and mostly replies that evade the question."""

import re

from opentinker.environments.builtin import Arithmetic
from scripts import warmed_up

HELD_OUT = 40


def test_no_held_out_problem_is_taught() -> None:
    tasks = Arithmetic(**warmed_up.RANGE).tasks("test") or ()
    held_out = {(task["a"], task["op"], task["b"]) for task in tasks}
    assert len(held_out) == HELD_OUT
    evasive = 0
    for row in warmed_up.chats(0):
        question, answer = (message["content"] for message in row["messages"])
        a, operator, b = re.search(r"What is (\d+) ([+-]) (\d+)\?", question).groups()  # type: ignore[union-attr]
        assert (int(a), operator, int(b)) not in held_out
        right = int(a) + int(b) if operator == "+" else int(a) - int(b)
        assert answer in (warmed_up.EVASION, f"{a} {operator} {b} = {right}")
        evasive += answer == warmed_up.EVASION
    assert evasive / warmed_up.CHATS == warmed_up.EVASIVE / 10
    assert warmed_up.chats(0) == warmed_up.chats(0) != warmed_up.chats(1)
