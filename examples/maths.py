"""Train a model to solve small word problems: one question, one answer, a LoRA adapter, GRPO.

    python examples/maths.py

Problems are generated. Those of the split "test" are never drawn in training.
"""

import argparse
import random
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import opentinker as ot

HELD_OUT = 100
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "cards", "eggs", "pens")
INSTRUCTION = "Show the sums, then end with 'Answer: <number>'."
Story = tuple[str, tuple[tuple[int, str, int], ...]]
"""What is told and asked, and the sums (a, operator, b) that lead to the answer; of each but the first, `a`
is the result of the one before.
"""

_ANSWER = re.compile(r"answer: *(-?\d+)(?!\d|\.\d)", re.IGNORECASE)


def result(a: int, operator: str, b: int) -> int:
    """Of one sum."""
    return {"+": a + b, "-": a - b, "x": a * b}[operator]


def change(dice: random.Random, most: int) -> Story:
    """Something comes, something goes."""
    who, what = dice.choice(NAMES), dice.choice(THINGS)
    a, b = dice.randint(2, most), dice.randint(2, most)
    c = dice.randint(1, a + b - 1)
    text = f"{who} has {a} {what}, gets {b} more and gives {c} away. How many {what} has {who} now?"
    return text, ((a, "+", b), (a + b, "-", c))


def together(dice: random.Random, most: int) -> Story:
    """One has more than the other."""
    (who, other), what = dice.sample(NAMES, 2), dice.choice(THINGS)
    a, more = dice.randint(2, most), dice.randint(1, most)
    text = f"{who} has {a} {what}. {other} has {more} more than {who}. How many have they together?"
    return text, ((a, "+", more), (a + more, "+", a))


def boxes(dice: random.Random, most: int) -> Story:
    """Equal parts, and some of the whole are gone."""
    who, what = dice.choice(NAMES), dice.choice(THINGS)
    a, b = dice.randint(2, min(most, 9)), dice.randint(2, min(most, 9))
    c = dice.randint(1, a * b - 1)
    text = f"{who} buys {a} boxes of {b} {what} and loses {c}. How many {what} are left?"
    return text, ((a, "x", b), (a * b, "-", c))


KINDS: dict[str, Callable[[random.Random, int], Story]] = {
    "change": change,
    "together": together,
    "boxes": boxes,
}


class WordProblems(ot.Environment):
    """A story of two sums; the reward is 1 if the number after the last "Answer:" is right, otherwise 0."""

    max_turns = 1
    splits = ("test",)

    def __init__(self, most: int = 20, kinds: Sequence[str] = tuple(KINDS)) -> None:
        """`most` is the largest number told; `kinds` are the stories, by name."""
        if most < 2:
            raise ValueError(f"most must be at least 2, not {most}")
        if not kinds or not set(kinds) <= set(KINDS):
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, not {list(kinds)}")
        self.most = most
        self.kinds = tuple(kinds)

    def reset(self, *, seed: int, task: dict[str, Any]) -> ot.Observation:
        story = (task["question"], task["sums"]) if task else self.draw(seed)
        self.question, self.sums = story[0], tuple(tuple(each) for each in story[1])
        self.answer = result(*self.sums[-1])
        return ot.Observation(
            f"{self.question} {INSTRUCTION}", info={"sums": [list(each) for each in self.sums]}
        )

    def step(self, action: ot.Action) -> ot.StepResult:
        given = _ANSWER.findall(action.text)
        right = bool(given) and given[-1] == str(self.answer)
        info = {"answer": self.answer, "given": given[-1] if given else None}
        return ot.StepResult(reward=float(right), terminated=True, info=info)

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found: dict[str, dict[str, Any]] = {}
        for seed in range(100_000):
            question, sums = self.story(random.Random(f"test {seed}"))
            if held_out(question):
                found[question] = {"question": question, "sums": [list(each) for each in sums]}
            if len(found) == HELD_OUT:
                break
        return list(found.values())

    def draw(self, seed: int) -> Story:
        """A problem for training."""
        dice = random.Random(f"train {seed}")
        while held_out((story := self.story(dice))[0]):
            pass
        return story

    def story(self, dice: random.Random) -> Story:
        """Any problem."""
        return KINDS[dice.choice(self.kinds)](dice, self.most)


def held_out(question: str) -> bool:
    """One in eight questions is for tests only, whoever draws it."""
    return zlib.crc32(question.encode()) % 8 == 0


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--most", type=int, default=10, help="the largest number told")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 answers in each step")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/maths"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=WordProblems,
            env_options={"most": arguments.most},
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=ot.schedules.Linear(4e-4, arguments.steps),
            sampling=ot.SamplingParams(max_tokens=arguments.max_tokens),
            evaluation=ot.Evaluation(tasks=arguments.tasks),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "reward.png", "Word problems")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
