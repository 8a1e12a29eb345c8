"""The word problems: what is asked, what counts as right, what is held out."""

import random
import re

import pytest

import opentinker as ot
from examples.maths import HELD_OUT, KINDS, WordProblems, held_out, result

TASK = {"question": "Ann has 7 pens, gets 5 more and gives 3 away.", "sums": [[7, "+", 5], [12, "-", 3]]}


def graded(text: str) -> float | None:
    environment = WordProblems()
    environment.reset(seed=0, task=TASK)
    end = environment.step(ot.Action(text))
    assert end.terminated
    return end.reward.value


@pytest.mark.parametrize(
    "text", ["Answer: 9", "7 + 5 = 12, 12 - 3 = 9. Answer: 9", "answer:9.", "Answer: 8. No, answer: 9"]
)
def test_right(text: str) -> None:
    assert graded(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9",
        "Answer:",
        "Answer: <number>",
        "Answer: 8",
        "Answer: 90",
        "Answer: -9",
        "Answer: 9.5",
        "Answer: 9. Answer: 1",
    ],
)
def test_wrong(text: str) -> None:
    assert graded(text) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [2, 9, 50])
def test_sums_are_those_of_the_story(kind: str, most: int) -> None:
    for seed in range(100):
        question, sums = KINDS[kind](random.Random(seed), most)
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        assert max(numbers) <= max(most * 2, most * most)
        assert result(*sums[0]) == sums[1][0]
        assert result(*sums[1]) >= 0
        first, second, *_ = numbers
        last = numbers[-1]
        expected = {
            "change": first + second - last,
            "together": first + first + second,
            "boxes": first * second - last,
        }
        assert result(*sums[1]) == expected[kind]


def test_held_out_problems_are_never_drawn() -> None:
    environment = WordProblems(most=9)
    tasks = environment.tasks("test") or ()
    questions = {task["question"] for task in tasks}
    assert len(questions) == len(tasks) == HELD_OUT
    drawn = {environment.draw(seed)[0] for seed in range(2000)}
    assert len(drawn) > 1000
    assert not drawn & questions
    assert not any(map(held_out, drawn))
    for task in tasks:
        environment.reset(seed=0, task=task)
        assert environment.step(ot.Action(f"Answer: {result(*task['sums'][-1])}")).reward.value == 1.0


def test_the_seed_decides() -> None:
    first, again, other = (WordProblems().reset(seed=seed, task={}).text for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("options", [{"most": 1}, {"kinds": []}, {"kinds": ["riddle"]}])
def test_options_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        WordProblems(**options)  # type: ignore[arg-type]
