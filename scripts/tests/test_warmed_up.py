"""What the warm-up learns from: never what is held out, and labels of which half are wrong."""

import re

from opentinker.environments.builtin import Arithmetic
from scripts import warmed_up


def test_no_held_out_problem_is_taught() -> None:
    tasks = Arithmetic(**warmed_up.RANGE).tasks("test") or ()
    held_out = {(task["a"], task["op"], task["b"]) for task in tasks}
    assert len(held_out) == 180
    wrong = 0
    for row in warmed_up.chats(0):
        question, answer = (message["content"] for message in row["messages"])
        a, operator, b = re.search(r"What is (\d+) ([+-]) (\d+)\?", question).groups()  # type: ignore[union-attr]
        assert (int(a), operator, int(b)) not in held_out
        wrong += int(answer) != (int(a) + int(b) if operator == "+" else int(a) - int(b))
    assert wrong / warmed_up.CHATS == warmed_up.WRONG
    assert warmed_up.chats(0) == warmed_up.chats(0) != warmed_up.chats(1)
